"""Memory of devices: what there is, what a run has held, and what helps where it is not enough."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax

from transformer.config._checks import ConfigError
from transformer.data._config import shared_rows
from transformer.nn._partitioning import platform as computed_on
from transformer.nn._sharding import check_model, row_ways
from transformer.training._chunked_loss import most_at_once
from transformer.training._flops import Shapes, batch_field, batch_rows, sequences
from transformer.training._recipe import Recipe
from transformer.training._tasks import TASKS

if TYPE_CHECKING:
    from transformer.training._parallel import Placement

GIB = 2**30
"""bytes of a GiB"""
STEP, EVALUATION = "the training step", "evaluation"
"""what a run may be doing"""


class OutOfMemoryError(RuntimeError):
    """A device has no room for what a run needs. The message has the numbers, and what would help."""


def device_bytes(devices: Sequence[Any]) -> int:
    """Bytes that JAX may use of the first of these devices; of a CPU its share of the machine's memory."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)


def peak_bytes() -> int:
    """Most bytes that a device of this process has held at once so far; where devices don't tell, as CPUs, most that
    the whole process had resident.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    held = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    if held:
        return max(held)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def shard_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of shapes."""

    def size(leaf):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def memory_in_error(message: str) -> tuple[int, int] | None:
    """Bytes (needed, available) of a device, of the compiler's RESOURCE_EXHAUSTED; None where it tells none."""
    size = r"([\d.]+)([KMGT]?)"
    for pattern in (rf"[Uu]sed {size} of {size} hbm", rf"\({size}\) exceeds available HBM \({size}\)"):
        if found := re.search(pattern, message):
            first, unit, second, other = found.groups()
            scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
            return round(float(first) * scale[unit]), round(float(second) * scale[other])
    return None


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a training step needs of one device, bytes."""

    state: int
    """parameters, what the optimizer keeps, averages and the batch"""
    gradients: int
    """with micro-batches twice: the sum, and those of one"""
    activations: int
    """all else: what the backward pass needs, logits, and what is in between"""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.state + self.gradients + self.activations


@dataclass(frozen=True)
class Remedy:
    """Something that lowers the memory of a recipe: `flags` of its command line, and `what` they do."""

    flags: str
    what: str
    need: Need | None = None
    """with it, an estimate; None: not known"""

    def __str__(self):
        return f"{self.flags}: {self.what}"


def times_smaller(needed: int, available: int, state: int) -> int | None:
    """The power of two by which to divide what is no state, so that it fits; None: the state alone does not fit."""
    if state >= min(needed, available):
        return None
    return max(2, 2 ** math.ceil(math.log2((needed - state) / (available - state))))


def remedies(
    recipe: Recipe, sizes: Mapping[str, int], times: int | None, need: Need | None = None, batch: Shapes | None = None
) -> list[Remedy]:
    """What lowers the memory of a recipe on a mesh of these sizes, `times` of `times_smaller`. With the `need` and the
    `batch` of one process, arrays or shapes (B, ...), each says what would be needed then.
    """
    found: list[Remedy] = []
    data, accumulation = recipe.data, recipe.training.accumulation
    ways, field = row_ways(sizes), batch_field(recipe.data)

    def add(flags: str, what: str, **shares: float) -> None:
        """`shares` of the parts of the need that stay."""
        parts = {} if need is None else {part: round(getattr(need, part) * share) for part, share in shares.items()}
        found.append(Remedy(flags, what, None if need is None else dataclasses.replace(need, **parts)))

    if sizes["data"] > 1:
        found_mesh = _mesh_flags(recipe, sizes)
        if found_mesh is not None:
            add(*found_mesh, state=1 / sizes["data"], gradients=1 / sizes["data"])
    if times is not None:
        if recipe.execution.remat == "none":
            kept = 1.0 if need is None or batch is None else _kept_by_remat(recipe, sizes, need, batch)
            add("--execution.remat full", "activations computed again, at about a third more FLOPs", activations=kept)
        if shared_rows(data)[1] % (ways * accumulation * times) == 0:
            more = f"--training.accumulation {accumulation * times}"
            two_sums = 2.0 if accumulation == 1 else 1.0
            add(more, "fewer rows at once, the same result", gradients=two_sums, activations=1 / times)
        smaller = dataclasses.replace(data, **{field: max(1, getattr(data, field) // times)})
        fewer = 0 < batch_rows(smaller) < batch_rows(data)
        if fewer and shared_rows(smaller)[1] % (ways * accumulation) == 0:
            size = f"--data.{field.replace('_', '-')} {getattr(smaller, field)}"
            add(size, "fewer rows in a step, another recipe", activations=1 / times)
        if recipe.model.dtype == "float32":
            add("--model.dtype bfloat16", "activations of half the size", activations=0.5)
    return found


def _mesh_flags(recipe: Recipe, sizes: Mapping[str, int]) -> tuple[str, str] | None:
    """Flags that split parameters over the devices that have a copy each, and what they do."""
    before = "" if recipe.parallel.kind == "mesh" else "--parallel.kind mesh "
    before += "" if recipe.parallel.data == -1 else "--parallel.data 1 "
    for axis, what in (("fsdp", "over the same devices as rows"), ("tensor", "by heads and feed-forward widths")):
        wanted = {**sizes, axis: sizes[axis] * sizes["data"], "data": 1}
        with contextlib.suppress(ConfigError):
            check_model(recipe.model, wanted)
            return f"{before}--parallel.{axis} {wanted[axis]}", f"parameters and optimizer state split {what}"
    return None


def _kept_by_remat(recipe: Recipe, sizes: Mapping[str, int], need: Need, batch: Shapes) -> float:
    """Share of the activations that is left with remat "full", about: what goes into each layer (B, T, D), the inside
    of one layer, and logits as often as they may be there.
    """
    model, tokens = recipe.model, math.prod(sequences(recipe, batch)) * jax.process_count()
    tokens //= row_ways(sizes) * recipe.training.accumulation
    width = 2 if model.dtype in ("bfloat16", "float16") else 4
    layers = TASKS[recipe.task].layers(model)
    logits = min(need.activations, logit_bytes(recipe, tokens, sizes["tensor"], computed_on()))
    inside = (need.activations - logits) / max(layers, 1)
    kept = logits + inside + layers * tokens * model.d_model * width
    return min(1.0, kept / max(need.activations, 1))


def logit_bytes(recipe: Recipe, tokens: int, tensor: int, kind: str) -> int:
    """Bytes of a device of a kind ("cpu", "gpu", "tpu") for logits in float32 and their gradient, of as many of its
    `tokens` as have them together, where `tensor` devices share the vocabulary.
    """
    model, together = recipe.model, recipe.training.loss_tokens
    if not model.vocab_size:
        return 0
    if together is None:
        together = most_at_once(kind, model.vocab_size, model.d_model, tensor)
    return 2 * 4 * min(tokens, together or tokens) * model.vocab_size // tensor


def step_need(recipe: Recipe, placement: Placement, batch: Shapes) -> Need:
    """What the training step needs for a batch (B, ...) as the loop of a process has it, by the compiler's account.

    Raises:
        OutOfMemoryError: the compiler finds no room, and does not say how much it would take.
    """
    state = placement.abstract_state()
    whole = {
        name: jax.ShapeDtypeStruct((placement.whole_rows(array.shape[0]), *array.shape[1:]), array.dtype)
        for name, array in batch.items()
    }
    gradients = shard_bytes(state.params) * (1 if recipe.training.accumulation == 1 else 2)
    try:
        stats = placement.lower(whole).compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        told = memory_in_error(str(error))
        if told is None:
            raise OutOfMemoryError("the compiler finds no room") from error
        held = shard_bytes(state)
        return Need(state=held, gradients=gradients, activations=max(told[0] - held - gradients, 0))
    new = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0) + stats.generated_code_size_in_bytes
    gradients = min(gradients, stats.temp_size_in_bytes)
    return Need(
        state=stats.argument_size_in_bytes,
        gradients=gradients,
        activations=stats.temp_size_in_bytes - gradients + new,
    )


def advice(
    recipe: Recipe,
    sizes: Mapping[str, int],
    need: Need,
    available: int,
    batch: Shapes | None = None,
    platform: str = "",
) -> str:
    """Sentences on a step that needs more than the `available` bytes of a device: numbers, and what helps. `batch` as
    for `remedies`; None: the state alone is too large.
    """
    parts = f"parameters, optimizer and batch {_gib(need.state)}"
    if batch is not None:
        parts += f", gradients {_gib(need.gradients)}, activations and the rest {_gib(need.activations)}"
    text = f"it needs about {_gib(need.total)} of a device ({parts}), and JAX may use {_gib(available)}."
    times = None if batch is None else times_smaller(need.total, available, need.state + need.gradients)
    found = [one for one in remedies(recipe, sizes, times, need, batch) if one.need.total < 0.97 * need.total]
    if platform == "cpu":  # it computes in float32 all the same
        found = [one for one in found if "bfloat16" not in one.flags]
    found += _more_devices(recipe, sizes, need, available)
    if found:
        alone = {one: "" if one.need.total <= available else ", not enough alone" for one in found}
        listed = "; ".join(f"{one} (about {_gib(one.need.total)}{more})" for one, more in alone.items())
        text += f" What helps, by estimates: {listed}."
    if need.total <= available:
        text += " By this it should fit: does another process use the device, or is its memory in pieces?"
    if platform == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        text += " JAX takes three quarters of a GPU: XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 before the command gives more."
    return f"{text} To try such flags without data: python -m transformer plan RECIPE --here FLAGS"


def _more_devices(recipe: Recipe, sizes: Mapping[str, int], need: Need, available: int) -> list[Remedy]:
    """The fewest devices of this kind that would do, by powers of two, all split over them; where that can be."""
    here = sizes["data"]
    if math.prod(sizes.values()) > here or recipe.parallel.kind != "mesh" or recipe.parallel.data != -1:
        return []  # a mesh of somebody's own: who made it knows what to enlarge

    def split(count: int) -> Need:
        return Need(
            state=need.state // count,
            gradients=need.gradients // count,
            activations=need.activations * here // count,
        )

    count = 2 * here
    while split(count).total > 0.9 * available:
        count *= 2
    with contextlib.suppress(ConfigError):
        check_model(recipe.model, {**sizes, "data": 1, "fsdp": count})
        if shared_rows(recipe.data)[1] % (count * recipe.training.accumulation) == 0:
            return [Remedy(f"{count} such devices with --parallel.fsdp {count}", "all split over them", split(count))]
    return []


class MemoryWatch:
    """Context manager of a run: an error inside for want of memory becomes an `OutOfMemoryError` that says what helps.

    To be set: `placement` once the recipe has a place, `batch` (B, ...) before each step, and `now` when it does
    something else than steps.
    """

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self.placement: Placement | None = None
        self.batch: Shapes | None = None
        self.now = STEP

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises OutOfMemoryError for an error for want of memory."""
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemoryError(f"out of memory in {self._where()}: {self._told(error)}") from error

    def _where(self) -> str:
        return "the making of the state" if self.batch is None and self.now == STEP else self.now

    def _told(self, error: BaseException) -> str:
        recipe, placement, devices = self._recipe, self.placement, jax.local_devices()
        available = device_bytes(devices)
        if placement is None:
            return f"JAX may use {_gib(available)} of a device. {_first_line(error)}"
        if self.now != STEP:
            return (
                f"JAX may use {_gib(available)} of a device, and at most {_gib(peak_bytes())} were held. Lower "
                f"--data.eval-batch-size ({recipe.data.eval_batch_size}); --evaluation.samples 0 writes no texts."
            )
        if self.batch is None:
            state = shard_bytes(placement.abstract_state())
            need = Need(state=state, gradients=0, activations=0)
            return advice(recipe, placement.sizes, need, available, platform=devices[0].platform)
        try:
            need = step_need(recipe, placement, self.batch)
        except OutOfMemoryError as again:
            return f"{again}, and JAX may use {_gib(available)} of a device. {_first_line(error)}"
        return advice(recipe, placement.sizes, need, available, self.batch, devices[0].platform)


def _gib(number: int) -> str:
    return f"{number / GIB:.2f} GiB" if number >= 0.1 * GIB else f"{number / 2**20:.2f} MiB"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].replace("RESOURCE_EXHAUSTED: ", "XLA says: ")
