"""A roofline of a program's time: what it would take if everything ran at its peak."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.training._chips import Chip


@dataclass(frozen=True)
class Estimate:
    """What a run of a program may take, seconds, and what that is made of."""

    seconds: float
    compute_seconds: float
    """products alone"""
    memory_seconds: float
    """bytes to and from the HBM alone"""
    collective_seconds: float
    """what devices tell each other alone"""
    mfu: float
    """model FLOPs utilization: share of all devices' peak"""


def estimate(
    chip: Chip, num_devices: int, *, model_flops: int, flops: int, hbm_bytes: int, wire_bytes: int
) -> Estimate:
    """A roofline, an estimate and not a measurement: max(F / P, M / W) + C / I seconds (Williams et al. 2009).

    Of one device, F: FLOPs that it computes; P: its peak in bfloat16. M: bytes it reads and writes; W: bandwidth of its
    HBM. C: bytes it sends; I: its share of the links of its chip. As if collectives never ran beside products, and
    everything at its peak: no latencies, no work that is not counted. `model_flops` are those of the model over all
    devices, without what is computed again: the MFU is about them.
    """
    peak = chip.flops / chip.devices
    compute = flops / peak
    memory = hbm_bytes / (chip.hbm_bandwidth / chip.devices)
    collective = wire_bytes / (chip.ici_bandwidth / chip.devices)
    seconds = max(compute, memory) + collective
    return Estimate(seconds, compute, memory, collective, model_flops / (num_devices * peak * seconds))
