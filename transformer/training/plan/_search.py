"""Search for the fastest mesh, batch size and remat policy of a recipe on a topology.

A coarse estimate orders the candidates and excludes those that can't fit; the others are compiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._execution import Remat
from transformer.data._config import shared_rows
from transformer.nn._sharding import (
    AXES,
    check_batch_sizes,
    check_model,
    check_slices,
    mesh_sizes,
    num_row_shards,
    parameter_spec,
)
from transformer.training._flops import batch_field, batch_rows, step_flops, step_tokens
from transformer.training._memory import GIB, logit_bytes
from transformer.training._recipe import Recipe
from transformer.training._state import TrainState, abstract_state, parameter_paths
from transformer.training.plan._contract import Topology
from transformer.training.plan._roofline import estimate
from transformer.training.plan._train_plan import Plan, make_plan
from transformer.training.tasks._table import TASKS

REMATS = tuple(policy for policy in Remat.__args__ if policy != "offload")
"""policies of what to recompute in the backward pass; "offload" is not among them, because its time depends on copies
that overlap with computation, which the coarse estimate does not count"""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the recipe, with a coarse estimate of its time and memory."""

    recipe: Recipe
    sizes: Mapping[str, int]
    """sizes of the mesh axes"""
    seconds: float
    """time of a step, estimated before compilation"""
    needed_bytes: int
    """memory of a device, estimated before compilation"""
    flags: str
    """options to append to the command of the recipe; the last value of an option takes effect"""


@dataclass(frozen=True)
class Tried:
    """A candidate that was compiled, with its plan or an error."""

    candidate: Candidate
    plan: Plan | None
    error: str
    """why there is no plan; otherwise empty"""
    seconds: float
    """time for compilation"""


def candidates(recipe: Recipe, topology: Topology, num_devices: int) -> list[Candidate]:
    """Return all candidates, the most promising first: those that may fit by speed, then the others by memory.

    The batch sizes are half, once and twice that of the recipe. Excluded are meshes that do not divide the model or the
    batch, and those for which the parameters and the optimizer state alone exceed the memory of a device.
    """
    state, flops, found = abstract_state(recipe), step_flops(recipe), []
    available = topology.usable_bytes
    field, length = batch_field(recipe.data), getattr(recipe.data, "sequence_length", None)
    size, rows = getattr(recipe.data, field), batch_rows(recipe.data)
    batches = [dataclasses.replace(recipe.data, **{field: number}) for number in (size // 2, size, 2 * size) if number]
    batches = [data for data in batches if batch_rows(data)]
    for sizes in meshes(recipe, num_devices):
        held = _held(state, sizes)
        for data in batches if held < available else []:
            try:
                check_model(recipe.model, sizes)
                check_batch_sizes(*shared_rows(data), recipe.training.accumulation, sizes, length)
            except ConfigError:
                continue
            within = {axis: size // recipe.parallel.dcn.sizes[axis] for axis, size in sizes.items()}
            parallel = dataclasses.replace(recipe.parallel, kind="mesh", **within)
            changed = dataclasses.replace(recipe, data=data, parallel=parallel)
            for remat in REMATS:
                execution = dataclasses.replace(recipe.execution, remat=remat)
                one = dataclasses.replace(changed, execution=execution)
                found.append(_guessed(one, recipe, held, flops.total * batch_rows(data) // rows, topology))

    def place(one: Candidate) -> tuple[bool, float]:
        too_much = one.needed_bytes > available
        return too_much, one.needed_bytes if too_much else one.seconds / batch_rows(one.recipe.data)

    return sorted(found, key=place)


def _held(state: TrainState, sizes: Mapping[str, int]) -> int:
    """Return the bytes per device of a training state on a mesh of these sizes."""
    total = 0
    for name, leaf in zip(parameter_paths(state), jax.tree.leaves(state), strict=True):
        spec = parameter_spec(name, leaf.shape, sizes)
        total += leaf.size * leaf.dtype.itemsize // math.prod(sizes[axis] for axis in spec if axis)
    return total


def meshes(recipe: Recipe, num_devices: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of mesh axes that the model can use, multiples of those across slices, for this number of
    devices.
    """
    axes = ["fsdp", "tensor"]
    if hasattr(recipe.data, "sequence_length"):  # all rows have the same length
        axes.append("context")
    if any(kind.moe is not None for kind in recipe.model.kinds):
        axes.append("expert")
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for split in itertools.product(divisors, repeat=len(axes)):
        if num_devices % math.prod(split) == 0:
            sizes = dict(zip(axes, split, strict=True)) | {"data": num_devices // math.prod(split)}
            sizes = {axis: sizes.get(axis, 1) for axis in AXES}
            if not any(size % recipe.parallel.dcn.sizes[axis] for axis, size in sizes.items()):
                yield sizes


def _guessed(recipe: Recipe, before: Recipe, held: int, work: int, topology: Topology) -> Candidate:
    """Estimate the time and memory of a candidate coarsely, only to order the candidates; the flags extend `before`.

    The activations follow Korthikanti et al. 2022, arXiv 2205.05198, section 4. `held` are the bytes per device of the
    training state, `work` the FLOPs of the step.
    """
    sizes = recipe.parallel.sizes
    model, remat = recipe.model, recipe.execution.remat
    width = jnp.dtype(model.dtype).itemsize
    layers = TASKS[recipe.task].layers(model)
    own = step_tokens(recipe) // (num_row_shards(sizes) * sizes["context"])  # tokens per device
    tensor, fsdp, num_devices = sizes["tensor"], sizes["fsdp"], math.prod(sizes.values())

    # Bytes per device of the residual stream (tokens, D) and of the hidden values of a feed-forward layer (tokens, F).
    # `inside`: all activations of one layer. `kept`: activations per layer that stay until the backward pass, which
    # are the input of the layer and what the remat policy saves.
    stream, inner = own * model.d_model * width, own * model.feed_forward_width * width // tensor
    inside = 8 * stream + 4 * inner
    saved = {"full": 0, "names": stream // tensor + inner, "dots": 4 * stream // tensor + 2 * inner, "none": inside}
    kept = stream + saved[remat]
    # The state is the parameters and two moments of Adam, so a third of it has the size of the gradients. Multiplied by
    # fsdp: the size that is communicated is that before the split. data: an all-reduce sends 2 x the device's shard of
    # the gradients; fsdp: two all-gathers (forward and backward pass) and a reduce-scatter send 3 x the gradients;
    # tensor and context: collectives of the residual stream in every layer.
    gradients = held * fsdp // 3
    wire = 2 * gradients // fsdp * (sizes["data"] > 1) + 3 * gradients * (fsdp > 1)
    wire += layers * stream * (8 * (tensor > 1) + 4 * (sizes["context"] > 1))
    # FLOPs including recomputation, relative to the model's. "full": a second forward pass is one more third, since the
    # backward pass takes twice as much as the forward pass.
    again = {"none": 1.0, "dots": 1.05, "names": 1.15, "full": 4 / 3}[remat]
    guess = estimate(
        topology.chip,
        num_devices,
        model_flops=work,
        flops=round(again * work / num_devices),
        hbm_bytes=3 * held + round(again * 2 * layers * (9 * stream + 4 * inner)),
        wire_bytes=wire,
    )
    parts = recipe.training.accumulation  # only the activations of one micro-batch are in memory
    needed = held + (layers * kept + inside) // parts + logit_bytes(recipe, own // parts, tensor, topology.platform)
    named = [axis for axis, size in sizes.items() if size > 1 or axis == "data" or before.parallel.sizes[axis] != 1]
    kind = "" if before.parallel.kind == "mesh" else "--parallel.kind mesh "
    mesh = kind + " ".join(f"--parallel.{axis} {getattr(recipe.parallel, axis)}" for axis in named)
    field = batch_field(recipe.data)
    flags = f"{mesh} --data.{field.replace('_', '-')} {getattr(recipe.data, field)} --execution.remat {remat}"
    return Candidate(recipe=recipe, sizes=sizes, seconds=guess.seconds, needed_bytes=needed, flags=flags)


def search(recipe: Recipe, topology: Topology, devices: list[Any], limit: int) -> Iterator[Tried]:
    """Compile the most promising candidates, at most `limit`, and yield each one when it is compiled.

    A candidate is skipped if it needs more memory than one that did not fit: the same mesh, at least as many rows, and
    at least as many saved activations. Errors of a candidate are its result and do not end the search.

    Raises:
        ConfigError: there are no candidates, or the recipe's sizes across slices do not fit the devices.
    """
    too_large: list[Candidate] = []
    check_slices(recipe.parallel.choose(devices), recipe.parallel.dcn)
    tried, num_devices = 0, len(recipe.parallel.choose(devices))
    found = candidates(recipe, topology, num_devices)
    if not found:
        why = _why_none(recipe, topology, num_devices)
        raise ConfigError(f"plan search found no mesh for {num_devices} {topology.unit}s: {why}")
    for candidate in found:
        if tried == limit:
            return
        if any(_asks_more(candidate, other) for other in too_large):
            continue
        tried += 1
        started, plan, message = time.perf_counter(), None, ""
        try:
            plan = make_plan(candidate.recipe, topology, devices)
        except (ValueError, RuntimeError) as error:  # of the recipe or the compiler, but not bugs of this program
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
        if plan is not None and not plan.fits:
            too_large.append(candidate)
        yield Tried(candidate, plan, message, time.perf_counter() - started)


def _why_none(recipe: Recipe, topology: Topology, num_devices: int) -> str:
    """Return why no mesh of this number of devices is possible, and what to do."""
    state = abstract_state(recipe)
    if all(_held(state, sizes) >= topology.usable_bytes for sizes in meshes(recipe, num_devices)):
        return (
            f"the parameters and the optimizer state alone need more than the {topology.usable_bytes / GIB:.4g} GiB "
            f"of a {topology.unit}, however they are split. Pass another --topology with more chips, or chips with "
            "more memory."
        )
    model, accumulation = recipe.model, recipe.training.accumulation
    field, rows = shared_rows(recipe.data)
    parts = [
        (f"--data.{field.replace('_', '-')}", rows, num_devices * accumulation),
        ("--model.d-model", model.d_model, num_devices),
        ("--model.num-heads", model.num_heads, num_devices),
    ]
    uneven = [f"{flag} {size} is not a multiple of {ways}" for flag, size, ways in parts if size % ways]
    return (
        f"{', '.join(uneven) or 'no split divides rows, width and heads'}. Change one of them, preferably the rows, or "
        "use another number of devices (--topology or --parallel.devices)."
    )


def _asks_more(candidate: Candidate, other: Candidate) -> bool:
    """Return whether a candidate needs at least as much memory as the other one."""
    mine, theirs = candidate.recipe, other.recipe
    keeps = mine.execution.remat in ("none", theirs.execution.remat) or theirs.execution.remat == "full"
    return candidate.sizes == other.sizes and batch_rows(mine.data) >= batch_rows(theirs.data) and keeps


def ranked(tried: Sequence[Tried]) -> list[Tried]:
    """Return the candidates that fit, the fastest by the estimate first."""
    fitting = [one for one in tried if one.plan is not None and one.plan.estimate is not None]
    return sorted(fitting, key=lambda one: -one.plan.units_per_second)


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
