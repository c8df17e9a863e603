"""Peak throughput and memory of TPUs and GPUs, as published by their vendors. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Published figures of an accelerator: a whole TPU chip, or a GPU."""

    name: str
    devices: int = 1
    """number of JAX devices per chip: 2 if each core is a device with its own half of the HBM"""
    unit: str = "chip"
    """name of a JAX device: a chip, a core or a GPU"""
    flops: float
    """peak throughput of bfloat16 matrix multiplications, FLOP/s"""
    float32_flops: float | None = None
    """peak throughput of matrix multiplications whose factors are float32, in JAX's default precision, FLOP/s; None:
    that of bfloat16, to which TPUs round the factors"""
    int8_flops: float | None = None
    """peak throughput of int8 matrix multiplications, operations per second; None: not published"""
    fp8_flops: float | None = None
    """peak throughput of matrix multiplications in float8_e4m3fn and float8_e5m2, FLOP/s; None: not published"""
    hbm: float
    """HBM capacity, GiB"""
    hbm_bandwidth: float
    """HBM bandwidth, bytes/s"""
    link_bandwidth: float
    """bandwidth of all links of a chip to the other chips of its slice (TPU) or host (GPU) together, one direction,
    bytes/s"""
    network_bandwidth: float | None = None
    """a chip's share of the bandwidth from its host to the data-center network, one direction, bytes/s; None: unknown,
    or several slices are not supported"""
    host_bandwidth: float | None = None
    """bandwidth between a chip and the memory of its host (PCIe), one direction, bytes/s; None: unknown"""


@dataclass(frozen=True, kw_only=True)
class Tpu(Chip):
    """A TPU version: the figures of a chip, and the topologies that it can have."""

    axes: int
    """number of axes of a topology: 2 or 3"""
    example: str
    """example of a common topology"""
    pod: int
    """maximum number of chips in a pod"""
    config: str | None = None
    """the compiler's name for the way the cores of a chip are combined; None: its default"""


# fmt: off
_COLUMNS = (
    "name", "devices", "unit", "axes", "example", "pod", "flops", "int8_flops", "fp8_flops",
    "hbm", "hbm_bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth", "config",
)
_ROWS = (
    ("v2",    2, "core", 2, "2x2",   256,  46e12,   None,    None,    16,  7e11,    248e9, None,    16e9, None),
    ("v3",    2, "core", 2, "2x2",   1024, 123e12,  None,    None,    32,  9e11,    328e9, None,    16e9, None),
    ("v4",    1, "chip", 3, "2x2x1", 4096, 275e12,  None,    None,    32,  1.2e12,  300e9, 6.25e9,  16e9, "megacore"),
    ("v5e",   1, "chip", 2, "4x4",   256,  197e12,  393e12,  None,    16,  819e9,   200e9, 3.125e9, 16e9, None),
    ("v5p",   1, "chip", 3, "2x2x2", 8960, 459e12,  918e12,  None,    95,  2765e9,  600e9, 6.25e9,  16e9, None),
    ("v6e",   1, "chip", 2, "4x4",   256,  918e12,  1836e12, None,    32,  1.6e12,  400e9, 12.5e9,  32e9, None),
    ("tpu7x", 2, "core", 3, "2x2x1", 9216, 2307e12, None,    4614e12, 192, 7.38e12, 600e9, 12.5e9,  16e9, None),
)
# fmt: on
CHIPS = {row[0]: Tpu(**dict(zip(_COLUMNS, row, strict=True))) for row in _ROWS}
"""TPUs by name. Sources: Google Cloud's documentation of each TPU version (docs.cloud.google.com/tpu/docs/v5e and so
on), with bidirectional bandwidths halved. The figures of v5e, v5p and v6e were checked against it in November 2026,
those of v4 and tpu7x not yet. For v2 and v3: Norrie et al. 2021, "The Design Process for Google's Training Chips: TPUv2
and TPUv3", IEEE Micro 41(2), table 1.

Bandwidths of the data-center network: Google Cloud's documentation (v5e: 6.4 Tbit/s for the 256 chips of a pod; v5p,
v6e and tpu7x: 50, 100 and 100 Gbit/s per chip), and for v4 Austin et al. 2025, "How to Scale Your Model", part 2
(jax-ml.github.io/scaling-book/tpus), which has the same figures for the others. v2 and v3 don't support several slices.
Peaks of int8: Google Cloud's documentation of v5e and v6e, and the same book for v5p; of fp8: that of tpu7x, in which
v5p and v6e have the peaks of bfloat16.
Bandwidths of PCIe: the same book, 16 GB/s per chip, and 32 GB/s for v6e. Read in November 2026."""


DEVICE_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
"""`jax.Device.device_kind` -> name in `CHIPS`"""

GPU_FLOPS = {
    "H100 80GB HBM3": 989e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100-SXM4-40GB": 312e12,
    "A100-SXM4-80GB": 312e12,
    "A100-PCIE-40GB": 312e12,
    "A100 80GB PCIe": 312e12,
    "L4": 121e12,
    "GeForce RTX 4090": 165e12,
    "Tesla T4": 65e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
}
"""Peak throughput of dense bfloat16 matrix multiplications with float32 accumulation, FLOP/s, by the CUDA device name
without "NVIDIA". T4 and V100 do not support bfloat16; their figure is for float16. Sources: NVIDIA's data sheets, with
figures for sparse matrices halved; for the RTX 4090, NVIDIA's white paper on the Ada architecture (2022), appendix A.
MIG partitions of a GPU have other names and no figure here."""


def peak_flops(device_kind: str) -> float | None:
    """Return the peak throughput of bfloat16 matrix multiplications of one JAX device, in FLOP/s.

    Args:
        device_kind: `jax.Device.device_kind`.

    Returns:
        The peak; None if it is unknown, as for every CPU.
    """
    if device_kind in DEVICE_KINDS:
        chip = CHIPS[DEVICE_KINDS[device_kind]]
        return chip.flops / chip.devices
    return GPU_FLOPS.get(device_kind.removeprefix("NVIDIA "))
