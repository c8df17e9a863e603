"""The devices that are there: what they can do, and how long a recipe's real training step takes on them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.training._chips import CHIPS, DEVICE_KINDS, Chip
from transformer.training._flops import batch_shapes
from transformer.training._memory import GIB, device_bytes
from transformer.training._parallel import place
from transformer.training._recipe import Recipe
from transformer.training._tasks import TASKS
from transformer.training.plan._topologies import Topology

MATRIX = 2048
"""width of the square matrices whose product is timed"""
COPIED = 2**26
"""float32 numbers that are read and written when bandwidth is timed"""


def present_topology(devices: list[Any]) -> tuple[Topology, str]:
    """These devices as a topology, and a sentence on where its figures come from: published, or timed now.

    Unknown devices are timed all at once, since those that are simulated share what there is.
    """
    kind = devices[0].device_kind
    if kind in DEVICE_KINDS:
        chip = CHIPS[DEVICE_KINDS[kind]]
        shape = (max(1, len(devices) // chip.devices),)
        return Topology(chip, shape), f"published figures of {chip.name}"
    dtype = jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16
    flops, bandwidth = _matrix_flops(devices, dtype), _copy_bandwidth(devices)
    chip = Chip(
        name="cpu" if devices[0].platform == "cpu" else kind.replace(" ", "-"),
        unit="device",
        axes=1,
        example="1",
        pod=len(devices),
        flops=flops,
        hbm=device_bytes(devices) / GIB,
        hbm_bandwidth=bandwidth,
        ici_bandwidth=bandwidth / 2,  # what is sent is read here and written there
    )
    told = (
        f"timed now, a device of {len(devices)} at once: {flops:.3g} FLOP/s of {jnp.dtype(dtype).name} products, "
        f"{bandwidth:.3g} bytes/s of a copy"
    )
    return Topology(chip, (len(devices),)), told


def _matrix_flops(devices: list[Any], dtype: Any) -> float:
    x = np.ones((MATRIX, MATRIX), dtype)
    return 2 * MATRIX**3 / _timed(lambda x: x @ x / MATRIX, x, devices)


def _copy_bandwidth(devices: list[Any]) -> float:
    numbers, times = COPIED // len(devices), 8

    def rewritten(x):  # in one buffer: the first touch of a new one is slow
        return jax.lax.fori_loop(0, times, lambda _, x: x + 1, x)

    return 2 * 4 * numbers * times / _timed(rewritten, np.ones(numbers, np.float32), devices)


def _timed(function: Callable[[Any], Any], x: np.ndarray, devices: list[Any]) -> float:
    """Seconds of the fastest of several runs on all devices at once."""
    run = jax.jit(function)
    parts = [jax.device_put(x, device) for device in devices]
    jax.block_until_ready([run(part) for part in parts])
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        jax.block_until_ready([run(part) for part in parts])
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Steps that were run."""

    step_seconds: float
    """of one step, the median"""
    steps: int
    """that were timed"""
    peak_bytes: int | None
    """most that the first device held; None: not told by it"""


def measure(recipe: Recipe, steps: int) -> Measured:
    """Runs the recipe's training step on made-up tokens, once to compile and `steps` times."""
    placement = place(recipe)
    batch = made_up_batch(recipe)
    state, metrics = placement.train_step(placement.spread(placement.new_state()), batch)
    jax.block_until_ready(metrics)
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        state, metrics = placement.train_step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begun)
    stats = jax.local_devices()[0].memory_stats() or {}
    return Measured(step_seconds=statistics.median(seconds), steps=steps, peak_bytes=stats.get("peak_bytes_in_use"))


def made_up_batch(recipe: Recipe) -> dict[str, np.ndarray]:
    """A batch of the recipe's shapes (B, ...): tokens or numbers drawn at random, nothing padded."""
    random, task = np.random.default_rng(0), TASKS[recipe.task]
    batch = {}
    for name, shape in batch_shapes(recipe).items():
        if name == "weights":
            batch[name] = np.ones(shape.shape, shape.dtype)
        elif name == "source_lengths":
            batch[name] = np.full(shape.shape, recipe.data.max_source_length, shape.dtype)
        elif name == "lengths":
            batch[name] = np.full(shape.shape, recipe.data.max_length, shape.dtype)
        elif shape.dtype == np.float32:
            batch[name] = random.normal(size=shape.shape).astype(np.float32)
        else:
            labels = task.labels and name == "targets"
            limit = recipe.model.output.num_classes if labels else recipe.model.vocab_size
            batch[name] = random.integers(0, limit, shape.shape, shape.dtype)
    return batch
