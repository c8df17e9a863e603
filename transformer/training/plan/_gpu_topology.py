"""Hosts of NVIDIA GPUs, and their devices for XLA's GPU compiler, which needs no GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.experimental import topologies

from transformer.config._checks import ConfigError
from transformer.training._gpus import Gpu
from transformer.training.plan._contract import CompilerError, Topology, probe, remove_flags
from transformer.training.plan._hlo_gpu import GpuProgram

PROBE = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

device = topologies.get_topology_desc(sys.argv[1], platform="cuda", **json.loads(sys.argv[2])).devices[0]
x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=SingleDeviceSharding(device))
jax.jit(lambda x: x @ jnp.sin(x)).lower(x).compile().memory_analysis()
print("compiled", file=sys.stderr)
"""
"""program that compiles a matrix multiplication and an elementwise operation for a topology, given as its name and its
options as JSON"""

PLUGINS = {13: "jax-cuda13-plugin", 12: "jax-cuda12-plugin"}
"""packages that contain JAX's part of the compiler, by version of CUDA; XLA's part has "pjrt" instead of "plugin" """

DEFAULT_FRACTION = 0.75
"""fraction of the memory of a GPU that JAX allocates unless XLA_PYTHON_CLIENT_MEM_FRACTION is set"""

# Units of an SM for each type, and operations of a unit per clock, where a multiplication and an addition count as one.
# The compiler's cost model reads them. XLA's own configurations of older GPUs have no such figures.
_SCALAR_TYPES = (("s32", 64, 1), ("u32", 64, 1), ("f32", 128, 1), ("f64", 64, 1))
_EIGHT_BIT_TYPES = (
    "s8", "u8", "f8e5m2", "f8e4m3fn", "f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz", "f8e4m3", "f8e3m4", "f8e8m0fnu",
)  # fmt: skip


@dataclass(frozen=True)
class _MatrixUnits:
    """Matrix units (tensor cores) of an SM, of which there are four."""

    clock: float
    """GHz at full load"""
    eight_bits: int
    """operations of 8 bits per clock and unit; of 16 bits half as many, of 32 bits a quarter"""
    float64: int
    """operations in float64 per clock and unit"""
    half_units: int
    """operations in float16 and bfloat16 per clock of a scalar unit"""


_MATRIX_UNITS = {9: _MatrixUnits(1.8295201, 1024, 32, 2), 10: _MatrixUnits(1.8353101, 2048, 16, 1)}
"""by the first number of the compute capability"""

_PRIMITIVE_TYPES = {
    "s8": 2, "s32": 4, "u8": 6, "u32": 8, "f16": 10, "f32": 11, "f64": 12, "bf16": 16, "f8e5m2": 19, "f8e4m3fn": 20,
    "f8e4m3b11fnuz": 23, "f8e5m2fnuz": 24, "f8e4m3fnuz": 25, "f8e4m3": 28, "f8e3m4": 29, "f8e8m0fnu": 33,
}  # fmt: skip
"""numbers of the types in XLA (xla_data.proto)"""


@dataclass(frozen=True)
class GpuTopology(Topology):
    """Hosts of GPUs of one kind. NVLink or PCIe connects the GPUs of a host, the network connects the hosts."""

    chip: Gpu
    """the kind of GPU"""
    hosts: int
    """number of hosts, of one slice"""
    per_host: int
    """number of GPUs in each host"""
    num_slices: int = 1
    """number of groups of so many hosts; the network between them is that between hosts"""

    platform: ClassVar[str] = "gpu"
    network: ClassVar[str] = "between hosts"
    counts_launches: ClassVar[bool] = True
    notes: ClassVar[tuple[str, ...]] = (
        "without a GPU the compiler can't measure which implementation of each matrix multiplication and attention "
        "kernel is fastest, so the compiled program on a GPU can have other kernels and temporaries",
    )

    def __str__(self):
        one = f"{self.chip.name}:{self.hosts}x{self.per_host}"
        return f"{self.num_slices}*{one}" if self.num_slices > 1 else one

    @property
    def num_chips(self) -> int:
        return self.num_slices * self.hosts * self.per_host

    @property
    def smallest(self) -> str:
        return f"{self.chip.name}:1x1"

    @property
    def usable_bytes(self) -> int:
        return int(_memory_fraction() * self.chip.memory_bytes)

    @property
    def memory_note(self) -> str:
        share = f"{100 * _memory_fraction():.4g} % of {self.hbm:.4g} GiB"
        return f"{share}; set XLA_PYTHON_CLIENT_MEM_FRACTION for another fraction"

    def devices(self) -> list[Any]:
        versions = _compiler_versions()
        remove_flags("--xla_tpu_")
        name, options = self.chip.name, {
            "topology": f"{self.num_slices} x {self.hosts} x {self.per_host}",
            "target_config": target_config(self.chip, **versions),
        }  # fmt: skip
        _check_compiler(name, json.dumps(options))
        return list(topologies.get_topology_desc(name, platform="cuda", **options).devices)

    def program(self, text: str, devices: Sequence[Any]) -> GpuProgram:
        return GpuProgram(text, [device.process_index for device in devices])


def _memory_fraction() -> float:
    """Return the fraction of the memory of a GPU that JAX uses; ConfigError if its environment variable is invalid."""
    text = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", str(DEFAULT_FRACTION))
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"XLA_PYTHON_CLIENT_MEM_FRACTION must be the fraction of a GPU's memory that JAX uses, above 0 and at most "
            f"1, got {text!r}. Unset this environment variable, or set it to 0.95."
        )
    return fraction


def target_config(gpu: Gpu, *, cuda: str, cudnn: str) -> str:
    """Return the description of a GPU for the compiler: XLA's message GpuTargetConfigProto, as text.

    Args:
        gpu: the GPU.
        cuda: version of CUDA, with three numbers, which decides on features of the compiler.
        cudnn: version of cuDNN, likewise.
    """
    major, minor = gpu.capability
    # From compute capability 9 on, code for exactly this one can use instructions that later ones don't have ("9.0a").
    exact = major >= 9
    numbers = dict(zip(("major", "minor", "patch"), cudnn.split("."), strict=True))
    device = {
        "name": json.dumps(gpu.device_kind),
        "device_vendor": json.dumps("NVIDIA Corporation"),
        "platform_version": json.dumps(f"Compute Capability {major}.{minor}{'a' * exact}"),
        "cuda_compute_capability": _message(
            major=major, minor=minor, feature_extension="ACCELERATED_FEATURES" if exact else "NONE"
        ),
        "core_count": gpu.cores,
        "fpus_per_core": gpu.float32_units,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": gpu.memory_bytes,
        "memory_bandwidth": round(gpu.hbm_bandwidth),
        "l2_cache_size": gpu.l2_bytes,
        "shared_memory_per_core": gpu.shared_bytes,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_block_optin": gpu.shared_bytes - (1024 if major >= 8 else 0),
        "threads_per_core_limit": gpu.threads,
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "pcie_bandwidth": round(gpu.host_bandwidth),
        "device_address_bits": 64,
        "ecc_enabled": "true",
        "driver_version": json.dumps(cuda),
        "runtime_version": json.dumps(cuda),
        "compile_time_toolkit_version": json.dumps(cuda),
        "dnn_version": json.dumps(cudnn),
    }
    device |= dict(zip((f"block_dim_limit_{axis}" for axis in "xyz"), (2**31 - 1, 65535, 65535), strict=True))
    device |= dict(zip((f"thread_dim_limit_{axis}" for axis in "xyz"), (1024, 1024, 64), strict=True))
    if gpu.link == "NVLink":
        device["device_interconnect_info"] = _message(active_links=round(gpu.link_bandwidth / _link_bandwidth(major)))
    if (units := _MATRIX_UNITS.get(major)) is not None:
        halves = (("f16", 128, units.half_units), ("bf16", 128, units.half_units))
        device["scalar_unit_description"] = _rates((*_SCALAR_TYPES, *halves), gpu.clock)
        products = [(name, 4, units.eight_bits) for name in _EIGHT_BIT_TYPES]
        products += [("f16", 4, units.eight_bits // 2), ("bf16", 4, units.eight_bits // 2)]
        products += [("f32", 4, units.eight_bits // 4)]
        device["matrix_unit_description"] = (
            f"{_rates(products, units.clock)[:-1]} {_rates([('f64', 4, units.float64)], gpu.clock)[1:]}"
        )
    return (
        f'gpu_device_info {_message(**device)} platform_name: "CUDA" dnn_version_info {_message(**numbers)} '
        f"device_description_str: {json.dumps(gpu.device_kind)}"
    )


def _link_bandwidth(major: int) -> float:
    """Return the bandwidth of one NVLink in one direction, bytes/s, for a compute capability from 8 on."""
    return 50e9 if major >= 10 else 25e9


def _message(**fields: Any) -> str:
    """Return a message of protocol buffers as text."""
    return "{ " + " ".join(f"{name}: {value}" for name, value in fields.items()) + " }"


def _rates(types: Sequence[tuple[str, int, int]], clock: float) -> str:
    parts = (
        _message(
            key=_PRIMITIVE_TYPES[name], value=_message(clock_rate_ghz=clock, units_per_core=units, ops_per_clock=ops)
        )
        for name, units, ops in types
    )
    return "{ " + " ".join(f"rate_infos {part}" for part in parts) + " }"


def _compiler_versions() -> dict[str, str]:
    """Return the versions of CUDA and cuDNN for which the compiler is installed; CompilerError if it is not."""
    jax_version = importlib.metadata.version("jax")
    install = f'pip install "jax[cuda13]=={jax_version}" (the extra plan-gpu; no GPU is needed)'
    number, plugin = next(((number, name) for number, name in PLUGINS.items() if _version(name)), (None, ""))
    if number is None:
        raise CompilerError(f"planning for GPUs needs XLA's GPU compiler, jax-cuda13-plugin. Install it: {install}")
    for package in (plugin, plugin.replace("plugin", "pjrt")):
        if (found := _version(package)) != jax_version:
            raise CompilerError(
                f"{package} must have the version of JAX, {jax_version}, got {found or 'no such package'}. Install the "
                f'same version: pip install "jax[cuda{number}]=={jax_version}"'
            )
    # Without the packages, as with a CUDA that is installed in the system, take the oldest versions of these releases.
    cuda = _version("nvidia-cuda-runtime" if number == 13 else "nvidia-cuda-runtime-cu12") or f"{number}.0.0"
    cudnn = _version(f"nvidia-cudnn-cu{number}") or "9.10.0"
    return {"cuda": ".".join(cuda.split(".")[:3]), "cudnn": ".".join(cudnn.split(".")[:3])}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_compiler(name: str, options: str) -> None:
    """Compile a tiny program in a child process; CompilerError with its error if it crashes or is rejected."""
    crash, stderr = probe(PROBE, name, options)
    lines = [line for line in stderr.splitlines() if line.strip()]
    if not crash and lines[-1:] == ["compiled"]:
        return
    versions = ", ".join(f"{one} {_version(one)}" for one in ("jax", *PLUGINS.values()) if _version(one))
    said = f"it crashed ({crash})" if crash else f"its message: {lines[-1] if lines else 'none'}"
    raise CompilerError(
        f"XLA's GPU compiler ({versions}) can't compile a matrix multiplication for {name}: {said}. If libraries of "
        f'CUDA are missing, install them: pip install "jax[cuda13]=={jax.__version__}" (the extra plan-gpu)'
    )


def gpu_topology(text: str, gpu: Gpu, sizes: str, num_slices: int) -> GpuTopology:
    """Return the topology `text` of a GPU: the part behind its name, such as "2x8", and the number of slices.

    Raises:
        ConfigError: the sizes are not two positive integers, a host can't have so many GPUs, or the fraction of the
            memory in XLA_PYTHON_CLIENT_MEM_FRACTION is invalid.
    """
    name, most = gpu.name, gpu.most_per_host
    _memory_fraction()  # here, because JAX reads it too, and prints a traceback for an invalid one
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", sizes):
        count = int(sizes) if re.fullmatch(r"[1-9]\d*", sizes) else 0
        fit = f"{-(-count // most)}x{most}" if count > most else f"1x{count or most}"
        raise ConfigError(
            f"a topology of {name} must be {name}:HOSTSxGPUS, the number of hosts and of GPUs in each host, got "
            f"{text!r}. Did you mean '{name}:{fit}'?"
        )
    hosts, per_host = map(int, sizes.split("x"))
    if per_host > most:
        raise ConfigError(
            f"{text} has {per_host} GPUs per host, but a host of {name} has at most {most}. For {hosts * per_host} "
            f"GPUs, pass {name}:{-(-hosts * per_host // most)}x{most}."
        )
    return GpuTopology(gpu, hosts, per_host, num_slices)
