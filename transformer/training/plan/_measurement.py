"""Measure the present devices: their peak speed, and the time of a recipe's training step."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from transformer.nn._axes import DType
from transformer.training._chips import CHIPS, DEVICE_KINDS, Chip
from transformer.training._flops import batch_shapes
from transformer.training._gpus import GPU_DEVICE_KINDS, GPUS
from transformer.training._memory import GIB, device_bytes
from transformer.training._parallel import place
from transformer.training._recipe import Recipe
from transformer.training.plan._contract import Topology
from transformer.training.plan._gpu_topology import GpuTopology
from transformer.training.plan._tpu_topology import TpuTopology

MATRIX = 2048
"""width of the square matrices in the matrix multiplication that is timed"""
COPIED = 2**26
"""number of float32 values that are read and written to measure the bandwidth"""


@dataclass(frozen=True)
class PresentDevices(Topology):
    """Devices of this process without published figures."""

    count: int
    """number of devices"""

    platform: ClassVar[str] = "cpu"

    def __str__(self):
        return f"{self.chip.name}:{self.count}"

    @property
    def num_chips(self) -> int:
        return self.count

    @property
    def smallest(self) -> str:
        return f"{self.chip.name}:1"

    def devices(self) -> list[Any]:
        return jax.local_devices()[: self.count]


def present_topology(devices: list[Any]) -> tuple[Topology, str]:
    """Return the present devices as a topology, and a phrase that states whether its figures are published or measured.

    Unknown devices are measured while all of them work, because simulated devices share the same hardware.
    """
    kind = devices[0].device_kind
    if kind in DEVICE_KINDS:
        chip = CHIPS[DEVICE_KINDS[kind]]
        shape = (max(1, len(devices) // chip.devices),)
        return TpuTopology(chip, shape), f"published figures for {chip.name}"
    if kind in GPU_DEVICE_KINDS:
        gpu = GPUS[GPU_DEVICE_KINDS[kind]]
        return GpuTopology(gpu, 1, len(devices)), f"published figures for {gpu.name}"
    dtype = jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16
    flops, bandwidth = _matrix_flops(devices, dtype), _copy_bandwidth(devices)
    chip = Chip(
        name="cpu" if devices[0].platform == "cpu" else kind.replace(" ", "-"),
        unit="device",
        flops=flops,
        hbm=device_bytes(devices) / GIB,
        hbm_bandwidth=bandwidth,
        link_bandwidth=bandwidth / 2,  # a byte sent is read from one memory and written to another
        host_bandwidth=_host_bandwidth(devices),
    )
    source = (
        f"measured now, per device with {len(devices)} in use: {flops:.3g} FLOP/s in {jnp.dtype(dtype).name} matrix "
        f"multiplications, {bandwidth:.3g} bytes/s in a copy"
    )
    return PresentDevices(chip, len(devices)), source


def _matrix_flops(devices: list[Any], dtype: DType) -> float:
    """Measure the FLOP/s of a device in a matrix multiplication."""
    x = np.ones((MATRIX, MATRIX), dtype)
    # n^3 multiplications and n^3 additions. Divided by n, the result is again all ones: no overflow.
    return 2 * MATRIX**3 / _timed(lambda x: x @ x / MATRIX, x, devices)


def _copy_bandwidth(devices: list[Any]) -> float:
    """Measure the bytes per second that a device reads and writes in an elementwise operation."""
    numbers, times = COPIED // len(devices), 8

    def rewritten(x):  # a loop over one buffer, because the first access to newly allocated memory is slow
        return jax.lax.fori_loop(0, times, lambda _, x: x + 1, x)

    # Each pass reads and writes 4 bytes per value.
    return 2 * 4 * numbers * times / _timed(rewritten, np.ones(numbers, np.float32), devices)


def _host_bandwidth(devices: list[Any]) -> float:
    """Measure the bytes per second that a device copies from the memory of the host, to all devices at once."""
    x = np.ones(COPIED // len(devices), np.float32)
    copies = functools.partial(jax.device_put, x, may_alias=False)
    return x.nbytes / min(_seconds(lambda: [copies(device) for device in devices], 3))


def _timed(function: Callable[[Any], Any], x: np.ndarray, devices: list[Any]) -> float:
    """Return the seconds of the fastest of several runs, each on all devices simultaneously."""
    run = jax.jit(function)
    parts = [jax.device_put(x, device) for device in devices]
    jax.block_until_ready([run(part) for part in parts])
    return min(_seconds(lambda: [run(part) for part in parts], 5))


def _seconds(action: Callable[[], PyTree], runs: int) -> list[float]:
    """Return the seconds of each of several runs, until its results are computed."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        jax.block_until_ready(action())
        seconds.append(time.perf_counter() - started)
    return seconds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured time and memory of training steps."""

    step_seconds: float
    """median time of a step"""
    steps: int
    """number of timed steps"""
    peak_bytes: int | None
    """peak memory of the first device; None if the device does not report it"""


def measure(recipe: Recipe, steps: int) -> Measured:
    """Run the recipe's training step on random data: once for compilation, then `steps` times."""
    placement = place(recipe)
    batch = made_up_batch(recipe)
    state, metrics = placement.train_step(placement.spread(placement.new_state()), batch)
    jax.block_until_ready(metrics)

    def step():
        nonlocal state
        state, metrics = placement.train_step(state, batch)
        return state, metrics

    seconds = _seconds(step, steps)
    stats = jax.local_devices()[0].memory_stats() or {}
    return Measured(step_seconds=statistics.median(seconds), steps=steps, peak_bytes=stats.get("peak_bytes_in_use"))


def made_up_batch(recipe: Recipe) -> dict[str, np.ndarray]:
    """Return a batch of the recipe's shapes (B, ...) with random tokens or values, without padding."""
    random = np.random.default_rng(0)
    batch = {}
    for name, shape in batch_shapes(recipe).items():
        if name == "weights":
            batch[name] = np.ones(shape.shape, shape.dtype)
        elif name == "source_lengths":
            batch[name] = np.full(shape.shape, recipe.data.max_source_length, shape.dtype)
        elif name == "lengths":
            batch[name] = np.full(shape.shape, recipe.data.max_length, shape.dtype)
        elif name == "segment_ids":  # one sequence per row
            batch[name] = np.ones(shape.shape, shape.dtype)
        elif name == "positions":
            batch[name] = np.broadcast_to(np.arange(shape.shape[-1], dtype=shape.dtype), shape.shape)
        elif shape.dtype == np.float32:
            batch[name] = random.normal(size=shape.shape).astype(np.float32)
        else:
            labels = hasattr(recipe.data, "labels") and name == "targets"
            limit = recipe.model.output.num_classes if labels else recipe.model.vocab_size
            batch[name] = random.integers(0, limit, shape.shape, shape.dtype)
    return batch
