"""Plan training: compile a recipe's training step for a topology, without running it and without data."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from transformer.nn.models._base import count_parameters
from transformer.training._flops import Flops, Shapes, batch_shapes, counted, step_flops
from transformer.training._memory import remedies, shard_bytes, times_smaller
from transformer.training._parallel import PLACEMENTS
from transformer.training._recipe import Recipe
from transformer.training._state import merged_params
from transformer.training.plan._compile import compile_program
from transformer.training.plan._contract import Topology
from transformer.training.plan._hlo import Cost
from transformer.training.plan._roofline import Estimate, estimate

MORE = "another --topology with more devices, or devices with more memory"
"""remedy that always helps"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory and estimated speed of a recipe's training step on a topology. Bytes are per device.

    `fits`, `memory` by kind, its total `needed_bytes`, `available_bytes`, and `host_memory` are those of `Fit`.
    """

    fits: bool
    mesh: str
    """mesh axes larger than 1"""
    num_parameters: int
    """number of parameters of the model"""
    memory: dict[str, int]
    needed_bytes: int
    available_bytes: int
    host_memory: dict[str, int] = dataclasses.field(default_factory=dict)
    counted: int
    """number of units in a step, which speed is measured in: tokens of sources and targets, images or forecast
    values"""
    unit: str
    """name of the unit"""
    flops: Flops
    """FLOPs of the model in a step"""
    computed_flops: int | None
    """FLOPs that all devices compute in a step, including recomputation (at least `flops`); None if not available"""
    cost: Cost | None
    """cost of the program per device; None if not available. Loops with an unknown number of iterations count once, and
    the estimate is then a lower bound"""
    estimate: Estimate | None
    """estimated time of a step; None if it does not fit, or the compiler can't print the program"""
    remedies: list[str]
    """changes that would help if the step does not fit"""
    seconds: float
    """time for lowering and compilation"""

    @property
    def units_per_second(self) -> float:
        """Estimated units per second of all devices together; 0 if the step does not fit."""
        return self.counted / self.estimate.seconds if self.estimate else 0.0


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """A lowered training step, before compilation."""

    lowered: jax.stages.Lowered
    sizes: Mapping[str, int]
    """sizes of the mesh axes, whose product is the number of devices"""
    devices: list[Any]
    """the devices in the order of the mesh"""
    described: str
    """mesh axes larger than 1; "" on one device"""
    params: PyTree
    """shapes of the model's parameters; with LoRA, of the merged ones"""
    held: dict[str, int]
    """bytes per device of the state and the batch, by kind"""


def program(recipe: Recipe, devices: Sequence[Any], batch: Shapes) -> StepProgram:
    """Lower the training step of a recipe for these devices and a batch of shapes; ConfigError if it does not fit."""
    placement = PLACEMENTS[recipe.parallel.kind](recipe, devices)
    state = placement.abstract_state()
    held = {
        "trained parameters (LoRA)" if "updates" in state.params else "parameters": shard_bytes(state.params),
        "frozen parameters": shard_bytes(state.base) + shard_bytes(state.teacher),
        "optimizer state": shard_bytes(state.opt_state),
        "averaged parameters": shard_bytes(state.ema),
        "batch": shard_bytes(placement.shapes(batch)),
    }
    params = jax.eval_shape(lambda one: merged_params(recipe, one.params, one.base), state)
    lowered, described = placement.lower(batch), placement.describe()
    return StepProgram(
        lowered=lowered, sizes=placement.sizes, devices=placement.devices, described=described, params=params, held=held
    )


def make_plan(recipe: Recipe, topology: Topology, devices: list[Any]) -> Plan:
    """Compile the recipe's training step for devices of a topology, and estimate its time.

    Raises:
        ConfigError: the recipe does not fit the mesh.
    """
    started = time.perf_counter()
    batch, (number, unit) = batch_shapes(recipe), counted(recipe)
    step = program(recipe, devices, batch)
    fit, text = compile_program(step.lowered, step.held, topology)
    flops, devices_used, cost = step_flops(recipe), math.prod(step.sizes.values()), None
    computed = expected = None
    if text is not None:
        cost = topology.program(text, step.devices).cost(
            devices_used, at_most=True, expert_shards=step.sizes.get("expert", 1)
        )
        # The text does not show what attention kernels compute, so assume the FLOPs of the model's attention (the full
        # attention matrix). A causal kernel skips about half of it, but recomputes about as much in the backward pass.
        own = cost.flops + (flops.attention // devices_used if cost.kernels else 0)
        computed = max(own, flops.total // devices_used)
        traffic = {"host_bytes": cost.host_bytes} | cost.parts
        expected = estimate(topology.chip, devices_used, model_flops=flops.total, flops=computed, **traffic)
    times = None if fit.fits else times_smaller(fit.needed_bytes, fit.available_bytes, sum(step.held.values()))
    return Plan(
        **dataclasses.asdict(fit),
        mesh=step.described or f"one {topology.unit}",
        num_parameters=count_parameters(step.params),
        flops=flops,
        computed_flops=computed and computed * devices_used,
        counted=number,
        unit=unit,
        cost=cost,
        estimate=expected,
        remedies=[] if fit.fits else [*map(str, remedies(recipe, step.sizes, times)), MORE],
        seconds=time.perf_counter() - started,
    )
