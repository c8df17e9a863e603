"""Roofline estimate of a program's run time: a lower bound from the peak speeds of the hardware."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.training._chips import Chip


@dataclass(frozen=True)
class Estimate:
    """Estimated run time of a program and its parts, in seconds."""

    seconds: float
    """estimated total"""
    compute_seconds: float
    """time for the matrix multiplications alone"""
    memory_seconds: float
    """time for reading and writing the HBM alone"""
    collective_seconds: float
    """time for the communication over the links of a slice or host alone"""
    mfu: float
    """model FLOPs utilization: fraction of the peak FLOP/s of all devices"""
    network_seconds: float = 0.0
    """time for the communication over the data-center network alone"""
    host_seconds: float = 0.0
    """time for copies from and to the memory of the host alone"""


def estimate(
    chip: Chip,
    num_devices: int,
    *,
    model_flops: int,
    flops: int,
    hbm_bytes: int,
    wire_bytes: int,
    network_bytes: int = 0,
    host_bytes: int = 0,
    int8_flops: int = 0,
    fp8_flops: int = 0,
    float32_flops: int = 0,
) -> Estimate:
    """Estimate the run time of a program as max(F / P, M / W, H / B) + C / I + D / N seconds.

    This is the roofline model (Williams et al. 2009). It assumes that everything runs at its peak, without latencies,
    that copies from and to the host always overlap with computation, and that collectives never do.

    Args:
        chip: hardware of the devices. Its figures are divided among its devices: P, the peak FLOP/s in bfloat16; W, the
            bandwidth of the HBM; I, the bandwidth of the links between the chips of a slice or host; N, that of the
            data-center network; B, that between chip and host.
        num_devices: number of devices.
        model_flops: FLOPs of the model on all devices, without recomputation; MFU is relative to these.
        flops: F, FLOPs that one device computes.
        hbm_bytes: M, bytes that one device reads from and writes to the HBM.
        wire_bytes: C, bytes that one device sends over the links.
        network_bytes: D, bytes that one device sends over the data-center network.
        host_bytes: H, bytes that one device copies in the busier direction: from the host, or to it.
        int8_flops: the part of F with integers of 8 bits, which run at their own peak if it is published.
        fp8_flops: the part of F with floating-point numbers of 8 bits, likewise.
        float32_flops: the part of F with float32, likewise.

    Raises:
        ValueError: bytes over a connection whose bandwidth is unknown.
    """
    # Figures of a chip are shared by its devices: on some TPUs a JAX device is one of two cores of a chip.
    peak = chip.flops / chip.devices
    compute = (flops - int8_flops - fp8_flops - float32_flops) / peak  # F / P
    for part, own in (
        (int8_flops, chip.int8_flops),
        (fp8_flops, chip.fp8_flops),
        (float32_flops, chip.float32_flops),
    ):
        compute += part / (peak if own is None else own / chip.devices)
    memory = hbm_bytes / (chip.hbm_bandwidth / chip.devices)  # M / W
    collective = wire_bytes / (chip.link_bandwidth / chip.devices)  # C / I
    across = _transfer_seconds(chip, "network_bandwidth", network_bytes)  # D / N
    host = _transfer_seconds(chip, "host_bandwidth", host_bytes)  # H / B
    # Computation, memory traffic and copies to the host overlap, so the slowest one determines the time.
    seconds = max(compute, memory, host) + collective + across
    mfu = model_flops / (num_devices * peak * seconds)
    return Estimate(seconds, compute, memory, collective, mfu, across, host)


def _transfer_seconds(chip: Chip, field: str, sent: int) -> float:
    """Return the time for the bytes of a device over a connection that its chip has only from some version on."""
    if not sent:
        return 0.0
    bandwidth = getattr(chip, field)
    if bandwidth is None:
        raise ValueError(f"the program copies {sent:,} bytes per device, but the {field} of {chip.name} is unknown.")
    return sent / (bandwidth / chip.devices)
