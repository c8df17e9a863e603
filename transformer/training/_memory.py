"""Device memory: capacity, peak usage, estimates for a recipe, and advice after an out-of-memory error.

From shapes, a run is checked before anything is allocated.
"""

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
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.data._config import shared_rows
from transformer.data._dataset import Dataset
from transformer.nn._partitioning import platform as computed_on
from transformer.nn._sharding import HOST_MEMORY, check_model, num_row_shards
from transformer.training._flops import Shapes, batch_field, batch_rows, batch_shapes, sequences
from transformer.training._parallel import Placement
from transformer.training._recipe import Recipe
from transformer.training._state import wide_dtype
from transformer.training.tasks._chunked_loss import most_at_once
from transformer.training.tasks._table import TASKS

GIB = 2**30
"""bytes per GiB"""
STEP, EVALUATION = "the training step", "evaluation"
"""phases of a run, for messages"""


class OutOfMemoryError(RuntimeError):
    """A run does not fit into device memory. The message has the required memory and remedies."""


def device_bytes(devices: Sequence[Any]) -> int:
    """Return the bytes that JAX can use on the first device; for CPUs, an equal share of the memory of the host."""
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return host_bytes() // len(devices)


def host_bytes() -> int:
    """Return the bytes that this process can use: memory of the machine, limit of the container, `ulimit -v`."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    with contextlib.suppress(OSError, ValueError):  # "max" without a limit; no such file in cgroup v1 or on macOS
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def peak_bytes() -> int:
    """Return the peak memory so far of a device of this process or, without statistics, as on CPUs, of the process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    held = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    if held:
        return max(held)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def shard_bytes(tree: PyTree) -> int:
    """Return the bytes in the memory of a device of a pytree of shapes, which may have shardings."""

    def size(leaf):
        if getattr(leaf.sharding, "memory_kind", None) == HOST_MEMORY:
            return 0
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def memory_in_error(message: str) -> tuple[int, int] | None:
    """Parse (required, available) bytes per device from a RESOURCE_EXHAUSTED message of XLA; None if it has none."""
    size = r"([\d.]+)([KMGT]?)"
    for pattern in (rf"[Uu]sed {size} of {size} hbm", rf"\({size}\) exceeds available HBM \({size}\)"):
        if found := re.search(pattern, message):
            first, unit, second, other = found.groups()
            scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
            return round(float(first) * scale[unit]), round(float(second) * scale[other])
    return None


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory of a training step per device, in bytes."""

    state: int
    """parameters, optimizer state, parameter averages and the batch"""
    gradients: int
    """gradients; with micro-batches their sum, in float32, and those of one micro-batch"""
    activations: int
    """everything else: activations for the backward pass, logits, and temporary arrays"""

    @property
    def total(self) -> int:
        """Return the total in bytes."""
        return self.state + self.gradients + self.activations


@dataclass(frozen=True)
class Remedy:
    """Option that reduces the memory of a recipe: the command-line `flags`, and `what` they do."""

    flags: str
    what: str
    need: Need | None = None
    """estimated memory with this option; None: unknown"""

    def __str__(self):
        return f"{self.flags}: {self.what}"


def times_smaller(needed: int, available: int, state: int) -> int | None:
    """Return by which power of two to divide all memory but the state to make it fit; None: the state does not fit."""
    if state >= min(needed, available):
        return None
    return max(2, 2 ** math.ceil(math.log2((needed - state) / (available - state))))


def remedies(
    recipe: Recipe, sizes: Mapping[str, int], times: int | None, need: Need | None = None, batch: Shapes | None = None
) -> list[Remedy]:
    """Return options that reduce the memory of a recipe on mesh axes of these sizes.

    `times` is the result of `times_smaller`. With the current `need`, each remedy has an estimate. `batch` is that of
    one process, arrays or shapes (B, ...).
    """
    found: list[Remedy] = []
    data, accumulation = recipe.data, recipe.training.accumulation
    ways, field = num_row_shards(sizes), batch_field(recipe.data)

    def add(flags: str, what: str, **shares: float) -> None:
        """Add a remedy. `shares` are the fractions of the parts of `need` that remain with it."""
        parts = {} if need is None else {part: round(getattr(need, part) * share) for part, share in shares.items()}
        found.append(Remedy(flags, what, None if need is None else dataclasses.replace(need, **parts)))

    replicas = sizes["data"] // recipe.parallel.dcn.data  # in each slice
    if replicas > 1:
        found_mesh = _mesh_flags(recipe, sizes, replicas)
        if found_mesh is not None:
            add(*found_mesh, state=1 / replicas, gradients=1 / replicas)
    if times is not None:
        if recipe.execution.remat == "none":
            kept = 1.0 if need is None or batch is None else _kept_by_remat(recipe, sizes, need, batch)
            add("--execution.remat full", "recomputes activations, about a third more FLOPs", activations=kept)
        if shared_rows(data)[1] % (ways * accumulation * times) == 0:
            more = f"--training.accumulation {accumulation * times}"
            # The first accumulation adds the sum over micro-batches, in at least float32.
            narrow = jnp.dtype(recipe.model.parameters.dtype).itemsize
            more_sums = 1.0 + max(4 / narrow, 1.0) if accumulation == 1 else 1.0
            add(more, "smaller micro-batches, same result", gradients=more_sums, activations=1 / times)
        smaller = dataclasses.replace(data, **{field: max(1, getattr(data, field) // times)})
        fewer = 0 < batch_rows(smaller) < batch_rows(data)
        if fewer and shared_rows(smaller)[1] % (ways * accumulation) == 0:
            size = f"--data.{field.replace('_', '-')} {getattr(smaller, field)}"
            add(size, "fewer rows per step, changes the results", activations=1 / times)
        if recipe.model.dtype == "float32":
            add("--model.dtype bfloat16", "halves the activations", activations=0.5)
    return found


def _mesh_flags(recipe: Recipe, sizes: Mapping[str, int], replicas: int) -> tuple[str, str] | None:
    """Return flags that shard the parameters over their replicas in a slice, and a description; None if impossible."""
    before = "" if recipe.parallel.kind == "mesh" else "--parallel.kind mesh "
    before += "" if recipe.parallel.data == -1 else "--parallel.data 1 "
    for axis, what in (
        ("fsdp", "over the data-parallel devices"),
        ("tensor", "by attention heads and feed_forward.d_ff"),
    ):
        wanted = {**sizes, axis: sizes[axis] * replicas, "data": sizes["data"] // replicas}
        with contextlib.suppress(ConfigError):
            check_model(recipe.model, wanted)
            within = wanted[axis] // recipe.parallel.dcn.sizes[axis]
            return f"{before}--parallel.{axis} {within}", f"shards parameters and optimizer state {what}"
    return None


def _kept_by_remat(recipe: Recipe, sizes: Mapping[str, int], need: Need, batch: Shapes) -> float:
    """Estimate the share of activations that remat "full" keeps: inputs of layers, one whole layer, and the logits."""
    model, tokens = recipe.model, math.prod(sequences(recipe, batch)) * jax.process_count()
    tokens //= num_row_shards(sizes) * recipe.training.accumulation  # tokens per device and micro-batch
    width = 2 if model.dtype in ("bfloat16", "float16") else 4
    layers = TASKS[recipe.task].layers(model)
    logits = min(need.activations, logit_bytes(recipe, tokens, sizes["tensor"], computed_on()))
    inside = (need.activations - logits) / max(layers, 1)  # activations of one layer
    kept = logits + inside + layers * tokens * model.d_model * width
    return min(1.0, kept / max(need.activations, 1))


def logit_bytes(recipe: Recipe, tokens: int, tensor: int, kind: str) -> int:
    """Return the bytes per device for the logits of one chunk and their gradient, both in float32.

    `tensor` is the number of devices over which the vocabulary is sharded, `kind` the platform: "cpu", "gpu" or "tpu".
    """
    model, together = recipe.model, recipe.training.loss_tokens
    if not model.vocab_size:
        return 0
    if together is None:
        together = most_at_once(kind, model.vocab_size, model.d_model, tensor)
    # 2 arrays (logits and their gradient) x 4 bytes x (n, V); loss_tokens = 0 means all tokens in one chunk.
    return 2 * 4 * min(tokens, together or tokens) * model.vocab_size // tensor


def step_need(recipe: Recipe, placement: Placement, batch: Shapes) -> Need:
    """Compile the training step for the batch (B, ...) of one process; return its memory, as the compiler reports it.

    OutOfMemoryError if the program does not fit, and the compiler does not report how much memory it requires.
    """
    state = placement.abstract_state()
    whole = {
        name: jax.ShapeDtypeStruct((placement.whole_rows(array.shape[0]), *array.shape[1:]), array.dtype)
        for name, array in batch.items()
    }
    gradients = shard_bytes(state.params)
    if recipe.training.accumulation > 1:
        gradients += shard_bytes(jax.tree.map(lambda leaf: leaf.update(dtype=wide_dtype(leaf.dtype)), state.params))
    try:
        stats = placement.lower(whole).compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        found = memory_in_error(str(error))
        if found is None:
            raise OutOfMemoryError("the compiled program does not fit") from error
        held = shard_bytes(state)
        return Need(state=held, gradients=gradients, activations=max(found[0] - held - gradients, 0))
    new = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0) + stats.generated_code_size_in_bytes
    gradients = min(gradients, stats.temp_size_in_bytes)
    return Need(
        state=stats.argument_size_in_bytes, gradients=gradients, activations=stats.temp_size_in_bytes - gradients + new
    )


def advice(
    recipe: Recipe,
    sizes: Mapping[str, int],
    need: Need,
    available: int,
    batch: Shapes | None = None,
    platform: str = "",
) -> str:
    """Describe the memory of a step that does not fit, and the options that reduce it.

    `available` are the bytes that JAX can use per device. Without a batch, the state alone does not fit. `platform` is
    "cpu", "gpu" or "tpu".
    """
    parts = f"parameters, optimizer state and batch {gib(need.state)}"
    if batch is not None:
        parts += f", gradients {gib(need.gradients)}, activations and temporaries {gib(need.activations)}"
    text = f"it needs about {gib(need.total)} per device ({parts}), and JAX can use {gib(available)}."
    times = None if batch is None else times_smaller(need.total, available, need.state + need.gradients)
    found = [one for one in remedies(recipe, sizes, times, need, batch) if one.need.total < 0.97 * need.total]
    if platform == "cpu":  # CPUs compute bfloat16 in float32, so it saves no memory
        found = [one for one in found if "bfloat16" not in one.flags]
    found += _more_devices(recipe, sizes, need, available)
    if found:
        alone = {one: "" if one.need.total <= available else ", not enough on its own" for one in found}
        listed = "; ".join(f"{one} (about {gib(one.need.total)}{more})" for one, more in alone.items())
        text += f" Options that reduce it, with estimates: {listed}."
    if need.total <= available:
        text += " So it should fit: check whether another process uses the device, or whether its memory is fragmented."
    if platform == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        text += " By default, JAX uses 75 % of a GPU; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 to use more."
    return f"{text} To test options without data, run: python -m transformer plan here RECIPE FLAGS"


def _more_devices(recipe: Recipe, sizes: Mapping[str, int], need: Need, available: int) -> list[Remedy]:
    """Return the smallest sufficient number of such devices (a power of two) with FSDP; [] if it is not possible."""
    here = sizes["data"]
    parallel = recipe.parallel
    if math.prod(sizes.values()) > here or parallel.kind != "mesh" or parallel.data != -1 or parallel.dcn.data > 1:
        return []  # for a user-defined mesh, only the user knows which axis to enlarge

    def split(count: int) -> Need:
        return Need(
            state=need.state // count, gradients=need.gradients // count, activations=need.activations * here // count
        )

    count = 2 * here
    while split(count).total > 0.9 * available:
        count *= 2
    with contextlib.suppress(ConfigError):
        check_model(recipe.model, {**sizes, "data": 1, "fsdp": count})
        if shared_rows(recipe.data)[1] % (count * recipe.training.accumulation) == 0:
            return [Remedy(f"{count} such devices with --parallel.fsdp {count}", "shards everything", split(count))]
    return []


class MemoryWatch(contextlib.AbstractContextManager):
    """Context manager that turns an out-of-memory error of a run into an `OutOfMemoryError` with remedies.

    Set `placement` when the recipe is placed on devices, `batch` (B, ...) before each step, and `now` when the phase of
    the run changes (`STEP` or `EVALUATION`).
    """

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self.placement: Placement | None = None
        self.batch: Shapes | None = None
        self.now = STEP

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise OutOfMemoryError if the error is an out-of-memory error of XLA."""
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            where = "state initialization" if self.batch is None and self.now == STEP else self.now
            raise OutOfMemoryError(f"out of memory in {where}: {self._explained(error)}") from error

    def _explained(self, error: BaseException) -> str:
        recipe, placement, devices = self._recipe, self.placement, jax.local_devices()
        available = device_bytes(devices)
        if placement is None:
            return f"JAX can use {gib(available)} per device. {_first_line(error)}"
        if self.now != STEP:
            return (
                f"JAX can use {gib(available)} per device, and the peak usage was {gib(peak_bytes())}. Lower "
                f"--data.eval-batch-size ({recipe.data.eval_batch_size}), or disable samples: --evaluation.samples 0."
            )
        if self.batch is None:
            state = shard_bytes(placement.abstract_state())
            need = Need(state=state, gradients=0, activations=0)
            return advice(recipe, placement.sizes, need, available, platform=devices[0].platform)
        try:
            need = step_need(recipe, placement, self.batch)
        except OutOfMemoryError as again:
            return f"{again}, and JAX can use {gib(available)} per device. {_first_line(error)}"
        return advice(recipe, placement.sizes, need, available, self.batch, devices[0].platform)


def gib(number: int) -> str:
    """Return a number of bytes in GiB or MiB."""
    return f"{number / GIB:.2f} GiB" if number >= 0.1 * GIB else f"{number / 2**20:.2f} MiB"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].replace("RESOURCE_EXHAUSTED: ", "XLA reports: ")


MOST_UNROLLED = 2_000
"""maximum number of unrolled layers: compiling a training step takes about one second for each (measured with 20 and 60
layers of `shakespeare_cpu` with d_model 16 on two busy CPU cores)"""
ANYWAY = "To start it anyway, pass --skip-memory-check."


def check_layers(recipe: Recipe) -> None:
    """Raise ConfigError if too many layers are unrolled (`execution.scan` False) to compile them in reasonable time."""
    layers = TASKS[recipe.task].layers(recipe.model)
    if layers > MOST_UNROLLED and not recipe.execution.scan:
        raise ConfigError(
            f"{layers:,} layers without --execution.scan are compiled one by one, each of which takes about a second; "
            f"at most {MOST_UNROLLED:,} are accepted. Pass --execution.scan True, or fewer --model.num-layers."
        )


def check_embedding(recipe: Recipe) -> None:
    """Raise OutOfMemoryError if the token embedding alone can't fit. Tracing would create tables of positions."""
    devices = recipe.parallel.choose(jax.devices())
    rows, width = recipe.model.vocab_size or 1, recipe.model.d_model
    needed, available = 4 * rows * width, _available(devices) * len(devices)
    if needed > available:
        raise OutOfMemoryError(
            f"the token embedding can't fit: {rows:,} x {width:,} numbers need {gib(needed)}, and all devices "
            f"together ({len(devices)}) have {gib(available)}. Use a smaller --model.d-model. {ANYWAY}"
        )


def check_memory(recipe: Recipe, dataset: Dataset, placement: Placement) -> None:
    """Raise OutOfMemoryError if state, gradients or batch of a run can't fit, before any of them is created.

    Activations and temporary arrays are not included, so a run that passes can still need too much memory; then
    `MemoryWatch` explains the error of the device. The data determines the lengths that the recipe leaves open.
    """
    lengths = {name: getattr(dataset, name) for name in recipe.data.open_lengths if getattr(recipe.data, name) is None}
    batch = batch_shapes(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **lengths)))
    devices = recipe.parallel.choose(jax.devices())
    available, on_host, platform = _available(devices), host_bytes(), devices[0].platform
    whole = sum(math.prod(array.shape) * array.dtype.itemsize for array in batch.values())
    state = placement.abstract_state()
    need = Need(state=shard_bytes(state), gradients=shard_bytes(state.params), activations=0)
    if need.total > available:
        text = advice(recipe, placement.sizes, need, available, platform=platform)
        smaller = "Or use a smaller model (--model.d-model, --model.feed-forward.d-ff, --model.num-layers)."
        raise OutOfMemoryError(f"the training state can't fit: {text}. {smaller} {ANYWAY}")
    on_device = whole // len(devices)
    if platform == "cpu":  # the batch is in the memory of the host twice: as loaded, and as an array of JAX
        on_device *= 2
    if whole > on_host * jax.process_count() or need.total + on_device > available:
        field = batch_field(recipe.data)
        raise OutOfMemoryError(
            f"a batch can't fit: it has {gib(whole)} ({_shapes(batch)}), the host has {gib(on_host)}, and JAX can use "
            f"{gib(available)} per device, of which the training state needs {gib(need.total)}. "
            f"Use a smaller --data.{field.replace('_', '-')} ({getattr(recipe.data, field):,}), or shorter rows. "
            f"{ANYWAY}"
        )


def _available(devices: Sequence[Any]) -> int:
    """Return the bytes of each device, of those that the run uses in this process."""
    return device_bytes([device for device in devices if device.process_index == jax.process_index()] or devices)


def _shapes(batch: Shapes) -> str:
    return ", ".join(f"{name} {' x '.join(f'{size:,}' for size in array.shape)}" for name, array in batch.items())
