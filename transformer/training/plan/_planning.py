"""A recipe's real training step, compiled for a topology: nothing is run and no data is read."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from transformer.nn.models._base import count_parameters
from transformer.training._flops import Flops, batch_shapes, counted, step_flops
from transformer.training._memory import remedies, times_smaller
from transformer.training._recipe import Recipe
from transformer.training.plan._compiling import compile_program
from transformer.training.plan._hlo import Collective, Program
from transformer.training.plan._programs import program
from transformer.training.plan._roofline import Estimate, estimate
from transformer.training.plan._topologies import Topology

MORE = "more chips, or a kind with more memory: another --topology"
"""what helps everything"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What compiling a recipe's step for a topology tells. Bytes are those of one device."""

    fits: bool
    """whether the compiler found room for it"""
    mesh: str
    """the axes that split something"""
    num_parameters: int
    """numbers in them"""
    memory: dict[str, int]
    """bytes by kind; without the compiler's part where it does not fit"""
    needed_bytes: int
    """in all"""
    available_bytes: int
    """that the compiler may use; where it fits, the HBM of a device"""
    counted: int
    """in a step, by what speed is told: tokens of sources and targets, images or forecast values"""
    unit: str
    """which of them"""
    flops: Flops
    computed_flops: int | None
    """by all devices, with what is computed again, no less than `flops`; None: not available"""
    collectives: list[Collective] | None
    """None: not available"""
    loops_known: bool
    """whether all is counted as often as the loops turn; else the estimate is a lower bound, some loops count once"""
    estimate: Estimate | None
    """None where it does not fit, or the compiler could not print the program"""
    remedies: list[str]
    """what would help where it does not fit"""
    seconds: float
    """that lowering and compiling took"""

    @property
    def units_per_second(self) -> float:
        """By the estimate, all devices together; 0 where it does not fit."""
        return self.counted / self.estimate.seconds if self.estimate else 0.0


def make_plan(recipe: Recipe, topology: Topology, devices: list[Any]) -> Plan:
    """Compiles the recipe's training step for devices of a topology.

    Raises:
        ConfigError: a recipe that does not fit the mesh.
    """
    begun = time.perf_counter()
    batch, (number, unit) = batch_shapes(recipe), counted(recipe)
    step = program(recipe, devices, batch)
    fit, text = compile_program(step.lowered, step.held, topology)
    flops, devices_used, cost = step_flops(recipe), len(step.devices), None
    computed = expected = None
    if text is not None:
        cost = Program(text).cost(devices_used)
        # What kernels compute no text tells: put at the model's scores, whole. By causality they skip half of them, and
        # they compute as many again in the backward pass.
        own = cost.flops + (flops.attention // devices_used if cost.kernels else 0)
        computed = max(own, flops.total // devices_used)
        expected = estimate(
            topology.chip,
            devices_used,
            model_flops=flops.total,
            flops=computed,
            hbm_bytes=cost.hbm_bytes,
            wire_bytes=cost.wire_bytes,
        )
    times = None if fit.fits else times_smaller(fit.needed_bytes, fit.available_bytes, sum(step.held.values()))
    return Plan(
        **dataclasses.asdict(fit),
        mesh=step.described or f"one {topology.unit}",
        num_parameters=count_parameters(step.params),
        flops=flops,
        computed_flops=computed and computed * devices_used,
        counted=number,
        unit=unit,
        collectives=None if cost is None else cost.collectives,
        loops_known=cost is not None and cost.loops_known,
        estimate=expected,
        remedies=[] if fit.fits else [*map(str, remedies(recipe, step.sizes, times)), MORE],
        seconds=time.perf_counter() - begun,
    )
