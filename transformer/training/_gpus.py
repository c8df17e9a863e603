"""Published figures of NVIDIA GPUs, and the properties that XLA's GPU compiler needs of them. Does not import JAX."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.training._chips import GPU_FLOPS, Chip


@dataclass(frozen=True, kw_only=True)
class Gpu(Chip):
    """A GPU: its published figures, and its properties as CUDA reports them."""

    device_name: str
    """key in `GPU_FLOPS`: the name in CUDA, without "NVIDIA" """
    link: str
    """name of the links between the GPUs of a host: NVLink or PCIe"""
    most_per_host: int
    """largest number of GPUs in a host"""
    capability: tuple[int, int]
    """compute capability"""
    cores: int
    """number of streaming multiprocessors (SM)"""
    float32_units: int
    """number of float32 units per SM"""
    clock: float
    """highest clock rate, GHz"""
    memory_bytes: int
    """memory that CUDA reports, bytes"""
    l2_bytes: int
    """size of the L2 cache, bytes"""
    shared_bytes: int
    """shared memory per SM, bytes; a thread block can use 1 KiB less, or all of it before compute capability 8"""
    threads: int
    """largest number of threads per SM"""

    @property
    def device_kind(self) -> str:
        """Name in CUDA, which is `jax.Device.device_kind`."""
        return self.device_name if self.device_name.startswith("Tesla") else f"NVIDIA {self.device_name}"


# fmt: off
_COLUMNS = (
    "name", "device_name", "float32_flops", "int8_flops", "fp8_flops", "hbm_bandwidth",
    "link", "link_bandwidth", "network_bandwidth", "host_bandwidth", "most_per_host",
)
_ROWS = (
    ("t4",        "Tesla T4",        8.1e12,  130e12,  None,    320e9,     "PCIe",   16e9,  1.5625e9, 16e9, 8),
    ("l4",        "L4",              60e12,   242e12,  242e12,  300e9,     "PCIe",   32e9,  1.5625e9, 32e9, 8),
    ("a100-40gb", "A100-SXM4-40GB",  156e12,  624e12,  None,    1555.2e9,  "NVLink", 300e9, 25e9,     32e9, 16),
    ("a100",      "A100-SXM4-80GB",  156e12,  624e12,  None,    2039.04e9, "NVLink", 300e9, 25e9,     32e9, 8),
    ("h100",      "H100 80GB HBM3",  494e12,  1979e12, 1979e12, 3352.32e9, "NVLink", 450e9, 50e9,     64e9, 8),
    ("h200",      "H200",            494e12,  1979e12, 1979e12, 4800e9,    "NVLink", 450e9, 50e9,     64e9, 8),
    ("b200",      "B200",            1125e12, 4500e12, 4500e12, 7672.32e9, "NVLink", 900e9, 50e9,     64e9, 8),
)
_CUDA_COLUMNS = (
    "capability", "cores", "float32_units", "clock", "memory_bytes", "l2_bytes", "shared_bytes", "threads",
)
_CUDA_ROWS = {
    "t4":        ((7, 5),  40,  64,  1.59,  15_843_721_216,  4_194_304,   65_536,  1024),
    "l4":        ((8, 9),  58,  128, 2.04,  23_612_293_120,  50_331_648,  102_400, 1536),
    "a100-40gb": ((8, 0),  108, 64,  1.41,  42_331_013_120,  41_943_040,  167_936, 2048),
    "a100":      ((8, 0),  108, 64,  1.41,  85_100_068_864,  41_943_040,  167_936, 2048),
    "h100":      ((9, 0),  132, 128, 1.98,  84_942_979_072,  52_428_800,  233_472, 2048),
    "h200":      ((9, 0),  132, 128, 1.98,  151_397_597_184, 52_428_800,  233_472, 2048),
    "b200":      ((10, 0), 148, 128, 1.965, 191_514_411_008, 132_644_864, 233_472, 2048),
}
# fmt: on


def _gpu(row: tuple) -> Gpu:
    figures = dict(zip(_COLUMNS, row, strict=True))
    cuda = dict(zip(_CUDA_COLUMNS, _CUDA_ROWS[figures["name"]], strict=True))
    flops, hbm = GPU_FLOPS[figures["device_name"]], cuda["memory_bytes"] / 2**30
    return Gpu(unit="GPU", flops=flops, hbm=hbm, **figures, **cuda)


GPUS = {row[0]: _gpu(row) for row in _ROWS}
"""GPUs by name: `a100` has 80 GB of memory, `a100-40gb` 40 GB; A100, H100, H200 and B200 are the SXM modules.

FLOP/s: NVIDIA's data sheets of each GPU (T4, 2019; L4, 2023; A100, 2021; H100, 2023; H200, 2024; HGX B200, 2025),
with the figures for sparse matrices halved. Those of float32 are for TF32, which is JAX's default precision; on the
T4, which lacks TF32, for float32 itself. The bfloat16 figure of the T4 is for float16: it has no units for bfloat16, so
XLA computes in float32 there.

Bandwidths: NVLink and PCIe from the same data sheets, with bidirectional figures halved. Network: a GPU's share of all
network cards of its host. DGX A100 (2021) has 8 x 200 Gbit/s for 8 GPUs; DGX H100, H200 and B200 have 8 x 400 Gbit/s.
Machines of cloud providers often have less. L4 and T4: 100 Gbit/s for a host of 8 GPUs, as in Google Cloud's
g2-standard-96 and AWS's g4dn.metal. The 16 GPUs of a host with A100-40GB are those of Google Cloud's a2-megagpu-16g.

CUDA's properties, and the bandwidths of the memory of A100, H100, H200 and B200: XLA's target configurations
(github.com/openxla/xla, xla/backends/gpu/target_config/specs, Apache 2.0). T4 and L4: the output of NVIDIA's program
`deviceQuery`. Read in November 2026."""

GPU_DEVICE_KINDS = {gpu.device_kind: name for name, gpu in GPUS.items()}
"""`jax.Device.device_kind` -> name in `GPUS`"""
