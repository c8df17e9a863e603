"""Check from shapes, before anything is allocated, that the training state and a batch fit into memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from transformer.config._checks import ConfigError
from transformer.data._dataset import Dataset
from transformer.training._flops import Shapes, batch_shapes
from transformer.training._memory import (
    Need,
    OutOfMemoryError,
    advice,
    device_bytes,
    gib,
    host_bytes,
    remedies_for_batch,
    shard_bytes,
)
from transformer.training._parallel import Placement
from transformer.training._recipe import Recipe
from transformer.training.tasks._table import TASKS

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
    """Raise OutOfMemoryError if the token embedding alone can't fit into all devices of the run.

    This needs no tracing: tracing a model creates its constants, such as a table of sinusoidal positions.
    """
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
        raise OutOfMemoryError(
            f"a batch can't fit: it has {gib(whole)} ({_shapes(batch)}), the host has {gib(on_host)}, and JAX can use "
            f"{gib(available)} per device, of which the training state needs {gib(need.total)}. "
            f"{remedies_for_batch(recipe)} {ANYWAY}"
        )


def _available(devices: Sequence[Any]) -> int:
    """Return the bytes of each device, of those that the run uses in this process."""
    return device_bytes([device for device in devices if device.process_index == jax.process_index()] or devices)


def _shapes(batch: Shapes) -> str:
    return ", ".join(f"{name} {' x '.join(f'{size:,}' for size in array.shape)}" for name, array in batch.items())
