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
    """time for the communication between devices alone"""
    mfu: float
    """model FLOPs utilization: fraction of the peak FLOP/s of all devices"""


def estimate(
    chip: Chip, num_devices: int, *, model_flops: int, flops: int, hbm_bytes: int, wire_bytes: int
) -> Estimate:
    """Estimate the run time of a program as max(F / P, M / W) + C / I seconds (roofline model, Williams et al. 2009).

    The estimate assumes that everything runs at its peak, without latencies, and that collectives never overlap with
    computation.

    Args:
        chip: hardware of the devices. Its figures are divided among its devices: P, the peak FLOP/s in bfloat16; W, the
            bandwidth of the HBM; I, the bandwidth of the links between chips.
        num_devices: number of devices.
        model_flops: FLOPs of the model on all devices, without recomputation; MFU is relative to these.
        flops: F, FLOPs that one device computes.
        hbm_bytes: M, bytes that one device reads from and writes to the HBM.
        wire_bytes: C, bytes that one device sends.
    """
    # Figures of a chip are shared by its devices: on some TPUs a JAX device is one of two cores of a chip.
    peak = chip.flops / chip.devices
    compute = flops / peak  # F / P
    memory = hbm_bytes / (chip.hbm_bandwidth / chip.devices)  # M / W
    collective = wire_bytes / (chip.ici_bandwidth / chip.devices)  # C / I
    # Computation and memory traffic overlap, so the slower one determines the time.
    seconds = max(compute, memory) + collective
    return Estimate(seconds, compute, memory, collective, model_flops / (num_devices * peak * seconds))
