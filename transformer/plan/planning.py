"""A recipe's real training step, compiled for a topology: nothing is run and no data is read."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from transformer.config import ConfigError
from transformer.plan.chips import Topology
from transformer.plan.flops import Flops, batch_shapes, step_flops
from transformer.plan.roofline import Collective, Estimate, collectives, estimate
from transformer.sharding import BATCH_AXES
from transformer.training.parallel import MeshPlacement, placed_shapes
from transformer.training.recipe import Recipe
from transformer.training.state import count_parameters

GIB = 2**30
"""bytes of a GiB"""


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
    batch_tokens: int
    """of sources and targets"""
    flops: Flops
    collectives: list[Collective] | None
    """None: not available"""
    loops_known: bool
    """whether collectives in loops are counted as often as the loops turn, else one pass"""
    estimate: Estimate | None
    """None where it does not fit"""
    remedies: list[str]
    """what would help where it does not fit"""
    seconds: float
    """that lowering and compiling took"""


def make_plan(recipe: Recipe, topology: Topology, devices: list[Any]) -> Plan:
    """Compiles the recipe's training step for devices of a topology.

    Raises:
        ConfigError: pmap, or a recipe that does not fit the mesh.
    """
    if recipe.parallel.kind != "mesh":
        raise ConfigError(f"parallel.kind {recipe.parallel.kind} can't be planned yet. Take --parallel.kind mesh.")
    begun = time.perf_counter()
    batch = batch_shapes(recipe)
    placement = MeshPlacement(recipe, devices)
    lowered = placement.lower(batch)
    state, mesh = placement.abstract_state(), placement.mesh
    memory = {
        "parameters": _shard_bytes(state.params),
        "optimizer state": _shard_bytes(state.opt_state),
        "averaged parameters": _shard_bytes(state.ema),
        "batch": _shard_bytes(placed_shapes(batch, mesh)),
    }
    told = {
        "mesh": placement.describe() or f"one {topology.unit}",
        "num_parameters": count_parameters(state.params),
        "flops": step_flops(recipe),
        "batch_tokens": sum(batch[name].size for name in ("tokens", "source") if name in batch),
    }
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed, available = memory_in_error(str(error)) or (0, round(topology.hbm * GIB))
        state = sum(memory.values())
        needed = max(needed, state)
        return Plan(
            fits=False,
            memory=memory | {"temporaries and the rest": needed - state},
            needed_bytes=needed,
            available_bytes=available,
            collectives=None,
            loops_known=False,
            estimate=None,
            remedies=remedies(recipe, mesh.shape, times_smaller(needed, available, state)),
            seconds=time.perf_counter() - begun,
            **told,
        )
    stats = compiled.memory_analysis()
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    memory["padding and results"] = stats.argument_size_in_bytes + own - sum(memory.values())
    memory["temporaries, with activations"] = stats.temp_size_in_bytes
    memory["code"] = stats.generated_code_size_in_bytes
    talk, known = _collectives_of(compiled, mesh.size)
    accessed = max(
        int((compiled.cost_analysis() or {}).get("bytes accessed", 0))
        * recipe.training.accumulation,  # a loop over them
        stats.argument_size_in_bytes + stats.output_size_in_bytes + 2 * stats.temp_size_in_bytes,
    )
    wire = sum(one.wire_bytes for one in talk or ())
    return Plan(
        fits=True,
        memory=memory,
        needed_bytes=sum(memory.values()),
        available_bytes=round(topology.hbm * GIB),
        collectives=talk,
        loops_known=known,
        estimate=estimate(told["flops"].total, accessed, wire, topology),
        remedies=[],
        seconds=time.perf_counter() - begun,
        **told,
    )


def memory_in_error(message: str) -> tuple[int, int] | None:
    """Bytes (needed, available) of a device, of the compiler's RESOURCE_EXHAUSTED; None where it tells none."""
    size = r"([\d.]+)([KMGT]?)"
    for pattern in (rf"[Uu]sed {size} of {size} hbm", rf"\({size}\) exceeds available HBM \({size}\)"):
        if found := re.search(pattern, message):
            first, unit, second, other = found.groups()
            scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
            return round(float(first) * scale[unit]), round(float(second) * scale[other])
    return None


def times_smaller(needed: int, available: int, state: int) -> int | None:
    """The power of two by which to divide what is no state, so that it fits; None: the state alone does not fit."""
    if state >= available:
        return None
    return max(2, 2 ** math.ceil(math.log2((needed - state) / (available - state))))


def remedies(recipe: Recipe, sizes: Mapping[str, int], times: int | None) -> list[str]:
    """Flags that lower the memory of a recipe on a mesh of these sizes, each with what it does; `times` of
    `times_smaller`.
    """
    found = []
    rows, accumulation = recipe.data.batch_size, recipe.training.accumulation
    ways = math.prod(sizes[axis] for axis in BATCH_AXES)
    fsdp = sizes["fsdp"] * sizes["data"]
    if sizes["data"] > 1 and recipe.model.d_model % fsdp == 0:
        data = "" if recipe.parallel.data == -1 else "--parallel.data 1 "
        found.append(
            f"{data}--parallel.fsdp {fsdp}: parameters and optimizer state split over the same devices as rows"
        )
    if times is not None:
        if recipe.execution.remat == "none":
            found.append("--execution.remat full: activations computed again, at about a third more FLOPs")
        if rows % (ways * accumulation * times) == 0:
            found.append(f"--training.accumulation {accumulation * times}: fewer rows at once, the same result")
            found.append(f"--data.batch-size {rows // times}: fewer rows in a step, another recipe")
        if recipe.model.dtype == "float32":
            found.append("--model.dtype bfloat16: activations of half the size")
    return [*found, "more chips, or a kind with more memory: another --topology"]


def _shard_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _collectives_of(compiled: Any, num_devices: int) -> tuple[list[Collective] | None, bool]:
    try:
        return collectives(compiled.as_text(), num_devices)
    except jax.errors.JaxRuntimeError:  # the compiler can't print some asynchronous programs
        return None, False
