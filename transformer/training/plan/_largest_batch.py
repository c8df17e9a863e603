"""Find the largest batch of a recipe whose training step fits a topology."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformer.config._checks import ConfigError
from transformer.nn._sharding import mesh_sizes, num_row_shards
from transformer.training._flops import batch_field
from transformer.training._recipe import Recipe
from transformer.training.plan._topologies import Topology
from transformer.training.plan._train_plan import Plan, make_plan

PRECISION = 32
"""The search ends when the result is known to 1 / PRECISION of itself, or to the smallest possible change."""
MOST_PROGRAMS = 12
"""maximum number of programs to compile"""


@dataclass(frozen=True)
class BatchTried:
    """A batch size whose training step was compiled."""

    size: int
    """value of the data field that sets the batch size"""
    plan: Plan


def largest_batch(recipe: Recipe, topology: Topology, devices: list[Any]) -> Iterator[BatchTried]:
    """Compile the step with different batch sizes until the largest one that fits is known; yield each one.

    Memory grows about linearly with the batch. Each new size is therefore where the line through the two nearest known
    sizes meets the available memory.

    Raises:
        ConfigError: the mesh does not fit the devices or the model.
    """
    field = batch_field(recipe.data)
    unit = _unit(recipe, topology, devices)

    def compiled(size: int) -> Plan:
        data = dataclasses.replace(recipe.data, **{field: size})
        return make_plan(dataclasses.replace(recipe, data=data), topology, devices)

    yield from _bisected(compiled, getattr(recipe.data, field), unit)


def best_of(tried: list[BatchTried]) -> BatchTried | None:
    """Return the largest batch that fits; None if none does."""
    return max((one for one in tried if one.plan.fits), key=lambda one: one.size, default=None)


def _unit(recipe: Recipe, topology: Topology, devices: list[Any]) -> int:
    """Return the smallest change of the batch size: each device needs the same number of rows."""
    data = recipe.data
    if batch_field(data) == "batch_tokens":
        return data.row_multiple * max(data.max_source_length, data.max_target_length)
    count = len(recipe.parallel.choose(devices))
    sizes = {"data": count} if recipe.parallel.kind == "pmap" else recipe.parallel.sizes
    unit = num_row_shards(mesh_sizes(sizes, count)) * recipe.training.accumulation
    if recipe.data.batch_size % unit:
        raise ConfigError(
            f"data.batch_size ({recipe.data.batch_size}) must be a multiple of {unit}: the devices of {topology} that "
            f"split the rows, times training.accumulation. Pass --data.batch-size {unit}."
        )
    return unit


def _bisected(compiled: Callable[[int], Plan], first: int, unit: int) -> Iterator[BatchTried]:
    fits: dict[int, int] = {}  # size -> needed bytes
    too_large: dict[int, int] = {}
    size = first
    for count in range(1, MOST_PROGRAMS + 1):
        plan = compiled(size)
        (fits if plan.fits else too_large)[size] = plan.needed_bytes
        yield BatchTried(size, plan)
        low, high = max(fits, default=0), min(too_large, default=None)
        step = max(unit, low // PRECISION // unit * unit)
        if high is not None and high - low <= step:
            return
        guess = _crossing(fits | too_large, plan.available_bytes)
        if high is None:
            size = min(max(guess or 2 * low, low + step), 8 * low)
        else:
            # The line alone would approach the limit slowly if memory grows faster than linearly: halve the gap too.
            middle = (low + high) // 2
            size = min(max(middle if guess is None or count % 2 == 0 else guess, low + step), high - step)
        size = max(unit, size // unit * unit)


def _crossing(needed: dict[int, int], available: int) -> int | None:
    """Return the size at which the line through the two sizes nearest to the limit reaches it; None without a line."""
    nearest = sorted(sorted(needed, key=lambda size: abs(needed[size] - available))[:2])
    if len(nearest) < 2:
        return None
    a, b = nearest
    slope = (needed[b] - needed[a]) / (b - a)
    return round(a + (available - needed[a]) / slope) if slope > 0 else None
