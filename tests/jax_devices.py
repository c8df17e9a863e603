"""The devices of the tests: eight simulated CPU devices, or the first GPU with `pytest -m gpu`.

`-m gpu` selects the default tests of `GPU_ROOMS`, which then compute on a GPU, except those marked
`@pytest.mark.cpu_only(reason)`. Without it, nothing is marked as gpu, and the same tests compute on the CPU.
"""

import importlib.metadata
import os
import re
from collections.abc import Iterable, MutableMapping

import pytest

GPU_ROOMS = ("tests/nn/", "tests/generate/", "tests/training/")
"""folders whose tests compare numbers"""
CPU_ROOMS = ("tests/training/plan/",)
"""folders inside of these whose tests never compute on a GPU: they compile for TPUs that are absent"""
OTHER_RUNS = ("slow", "parity")
"""other marks of tests that `-m gpu` leaves out"""


def asks_for_gpu(expression: str) -> bool:
    """Return whether an expression of pytest's option -m selects tests marked as gpu, not merely excludes them."""
    return any(name == "gpu" for name in re.findall(r"(?:\bnot\s+)?\b\w+", expression))


def prepare(gpu: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that JAX reads when it starts. Variables that the user has set stay."""
    if gpu:
        environment.setdefault("JAX_PLATFORMS", "cuda,cpu")
        # Several workers share the GPU, and by default each would reserve three quarters of its memory.
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if "xla_gpu_autotune_level" not in environment.get("XLA_FLAGS", ""):
            # Measuring variants of each matrix multiplication takes most of the time of a small program's compilation,
            # and can choose another variant in each process. Without it, products of small int8 matrices were wrong
            # (jaxlib 0.11.2, H200), probably in the Triton kernels that XLA then selects: leave them to cuBLAS.
            flags = " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
            environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + flags
        return
    environment.setdefault("JAX_PLATFORMS", "cpu")
    if "xla_force_host_platform_device_count" not in environment.get("XLA_FLAGS", ""):
        # Compilation takes most of the time of the tests. Optimization level 0 halves it, and the older emitters, with
        # one module per program, save another third. Later releases don't have them, and reject unknown flags.
        flags = " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        release = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
        if release == (0, 10):
            flags += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        if release >= (0, 10):
            # Eight devices share few cores: on a busy machine one may join a collective operation after the default of
            # 40 seconds, at which XLA ends the process.
            flags += " --xla_cpu_collective_call_terminate_timeout_seconds=300"
        environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + flags


def use_exact_products() -> None:
    """Multiply float32 matrices in float32: GPUs round the factors to 10 bits (TF32) by default."""
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")


def check_gpu() -> None:
    """Check that JAX computes on a GPU, unless JAX_PLATFORMS asks for another device.

    Raises:
        pytest.UsageError: it does not.
    """
    import jax

    try:
        found = jax.default_backend()
    except RuntimeError as error:
        found = f"none ({error})"
    if os.environ["JAX_PLATFORMS"].startswith("cuda") and found != "gpu":
        raise pytest.UsageError(
            f"-m gpu needs a GPU that JAX can use, got {found}. Install JAX for it (make setup ACCELERATOR=gpu), or "
            f"set JAX_PLATFORMS=cpu to run the same tests on the CPU."
        )


def mark_for_gpu(items: Iterable[pytest.Item]) -> None:
    """Mark as gpu the default tests of `GPU_ROOMS` that are not marked as cpu_only.

    `cpu_only(reason, cases=...)` applies to the parametrized cases whose id the regular expression `cases` matches.

    Raises:
        pytest.UsageError: a mark cpu_only has no reason, or other arguments.
    """
    for item in items:
        on_cpu = any(_applies(mark, item) for mark in item.iter_markers("cpu_only"))
        in_rooms = item.nodeid.startswith(GPU_ROOMS) and not item.nodeid.startswith(CPU_ROOMS)
        if in_rooms and not on_cpu and not any(item.get_closest_marker(name) for name in OTHER_RUNS):
            item.add_marker(pytest.mark.gpu)


def _applies(mark: pytest.Mark, item: pytest.Item) -> bool:
    """Return whether a mark cpu_only applies to this case of the test."""
    if len(mark.args) != 1 or not isinstance(mark.args[0], str) or not mark.kwargs.keys() <= {"cases"}:
        raise pytest.UsageError(
            f"{item.nodeid}: expected @pytest.mark.cpu_only('reason') or cpu_only('reason', cases=...)"
        )
    return bool(re.search(mark.kwargs.get("cases", ""), item.nodeid.partition("[")[2]))
