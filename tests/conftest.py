"""Strict by default: eight simulated devices, shapes checked, rank promotion refused, our own warnings are errors."""

import gc
import importlib.metadata
import os
import pathlib
import time

# Before JAX starts: a CPU that looks like eight devices, as few threads as a shared machine bears.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")  # nothing that an earlier code has left
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Level 0 halves the time that compiling takes, which is most of the time here. The older emitters, one module for
    # each program, take a third of what is left; later releases lack them, and refuse a flag they don't know.
    flags = " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags

import jaxtyping
from jaxtyping import install_import_hook

# Arrays are what the types are checked for. Where a user's own values arrive, the code's message is the check.
NUMERICS = [
    f"nn.{name}"
    for name in [
        "_attention",
        "_blocks",
        "kernels",
        "_layers",
        "_masks",
        "_mla",
        "models",
        "_moe",
        "_partitioning",
        "_positions",
        "_stacks",
    ]
]
NUMERICS += ["generate", "training._losses", "training._optimizers", "training._state", "training._step"]
NUMERICS += [f"viz.{path.stem}" for path in pathlib.Path(__file__).parents[1].glob("transformer/viz/*.py")]
_hook = install_import_hook([f"transformer.{name}" for name in NUMERICS], "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
BEGAN = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="skip tests whose turn comes later than this after the start")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """On a slow machine some tests with a reason, rather than none of what a stopped run has found."""
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"its turn came after more than --minutes {minutes:g}")


def pytest_collection_finish():
    """Tracing makes many objects that live on: Python looks for garbage seldom, and never among what is imported."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """Folder with real data, named by TRANSFORMER_TEST_DATA; tests that need it say aloud that they were skipped."""
    folder = os.environ.get("TRANSFORMER_TEST_DATA")
    if not folder:
        pytest.skip("TRANSFORMER_TEST_DATA names no folder with real data (docs: CONTRIBUTING.md, 'Tests')")
    return pathlib.Path(folder)


@pytest.fixture
def without_type_checks():
    """Turns the checker of shapes off, whose error would come before the message that a user sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def torch():
    """PyTorch. Not imported above: the tests are collected, and counted, where it is not installed."""
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def transformers(torch):
    """Hugging Face transformers, likewise."""
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory):
    """Each call of `train` compiles anew; the tests of a file that uses this share what was compiled."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
