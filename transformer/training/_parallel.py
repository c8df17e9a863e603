"""A training step spread over devices: one program over a mesh, or a copy of the model on each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer.config._checks import ConfigError
from transformer.data._config import shared_rows
from transformer.nn._sharding import (
    batch_sharding,
    check_batch_sizes,
    check_model,
    local_rows,
    make_mesh,
    mesh_sizes,
    place_batch,
    row_ways,
    state_shardings,
    told_sizes,
)
from transformer.training._recipe import Recipe
from transformer.training._state import TrainState, abstract_state, make_state
from transformer.training._step import Metrics, TrainStep, make_eval_step, make_train_step

MakeStep = Callable[..., TrainStep]
"""makes a pure step of a recipe and, for `jax.pmap`, an `axis_name`: `make_train_step`"""
HostBatch = Mapping[str, np.ndarray]
"""arrays by name, as the data gives them: to train on, the `rows` that this process holds; else the whole batch"""


class MeshPlacement:
    """One program, `jax.jit`, over a mesh; XLA puts in the communication (GSPMD, arXiv 2105.04663).

    Raises:
        ConfigError: a mesh that does not fit the devices, the model or the batch.
    """

    def __init__(self, recipe: Recipe, devices: Sequence[Any] | None = None, make_step: MakeStep = make_train_step):
        """`devices` None: those of this machine; others may be of a topology, to compile for what is not there.
        `make_step` makes the pure training step that this placement runs.
        """
        devices = _chosen(recipe) if devices is None else recipe.parallel.choose(devices)
        sizes = mesh_sizes(recipe.parallel.sizes, len(devices))
        check_model(recipe.model, sizes)
        length = getattr(recipe.data, "sequence_length", None)
        check_batch_sizes(*shared_rows(recipe.data), recipe.training.accumulation, sizes, length)
        self.mesh: Mesh = make_mesh(sizes, devices)
        make = functools.partial(make_state, recipe)
        with jax.set_mesh(self.mesh):  # as `new_state` does: the same function in the same mesh is traced once
            shapes = jax.eval_shape(make)
        self._shardings = state_shardings(shapes, self.mesh)
        self._shapes = jax.tree.map(_with_sharding, shapes, self._shardings)
        self._make = jax.jit(make, out_shardings=self._shardings)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        self._train = jax.jit(make_step(recipe), donate_argnums=0, out_shardings=(self._shardings, everywhere))
        self._eval = jax.jit(make_eval_step(recipe), out_shardings=everywhere)
        ways = row_ways(self.mesh.shape)
        self._parts = len(self.rows(ways)), ways

    def rows(self, total: int) -> np.ndarray:
        """Which rows of a batch of `total` to train on this process is to give, ascending."""
        return local_rows(self.mesh, total)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Of all mesh axes."""
        return self.mesh.shape

    def whole_rows(self, rows: int) -> int:
        """Rows of the whole batch of which this process has so many."""
        own, ways = self._parts
        return rows * ways // own

    def describe(self) -> str:
        """The axes that split something, "mesh: data 4 x tensor 2"; "" on one device."""
        told = told_sizes(self.mesh.shape)
        return f"mesh: {told}" if told else ""

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and places of the state, for restoring a checkpoint into."""
        return self._shapes

    def new_state(self) -> TrainState:
        """The state before the first step, each device making its part."""
        with jax.set_mesh(self.mesh):
            return self._make()

    def spread(self, state: TrainState) -> TrainState:
        """The state as `train_step` takes it, of one that was made or restored."""
        return state

    def whole(self, state: TrainState) -> TrainState:
        """The state as a checkpoint, an evaluation or a user takes it."""
        return state

    def train_step(
        self, state: TrainState, batch: HostBatch, limit: np.float32 | None = None
    ) -> tuple[TrainState, Metrics]:
        """One update, unless the mean loss is above `limit` (nats a target, or squared); the state that goes in is
        used up.
        """
        with jax.set_mesh(self.mesh):
            own, ways = self._parts
            total = self.whole_rows(len(batch["weights"]))
            placed = place_batch(batch, self.mesh, None if own == ways else self.rows(total), total)
            return self._train(state, placed, limit)

    def eval_step(self, params: Any, batch: HostBatch) -> Metrics:
        """Sums over a batch of any number of rows: it is filled up with rows of weight 0."""
        filled = _filled_up(batch, row_ways(self.mesh.shape))
        with jax.set_mesh(self.mesh):
            return self._eval(params, place_batch(filled, self.mesh))

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """The training step on shapes alone, for a look at its compiled form: of arrays, or of what has their shape."""
        with jax.set_mesh(self.mesh):
            return self._train.lower(self._shapes, placed_shapes(batch, self.mesh))


class PmapPlacement:
    """A copy of the model on each local device, `jax.pmap`: rows are split, gradients and sums added (psum).

    Raises:
        ConfigError: a batch whose rows the devices can't share evenly.
    """

    def __init__(self, recipe: Recipe, devices: Sequence[Any] | None = None, make_step: MakeStep = make_train_step):
        """`devices` and `make_step` as of `MeshPlacement`."""
        if jax.process_count() > 1:
            raise ConfigError(
                f"parallel.kind pmap spreads one process over its devices, but {jax.process_count()} processes train "
                f"together. Take --parallel.kind mesh: with all axes but data at 1 it does the same over all of them."
            )
        self._devices = recipe.parallel.choose(jax.local_devices() if devices is None else devices)
        count = len(self._devices)
        if recipe.parallel.data not in (-1, count):
            raise ConfigError(
                f"parallel.data is {recipe.parallel.data}, but pmap runs on all {count} devices. Leave it out, or give "
                f"parallel.devices {recipe.parallel.data}."
            )
        check_batch_sizes(
            *shared_rows(recipe.data), recipe.training.accumulation, mesh_sizes({"data": count}, count), None
        )
        self._shapes = abstract_state(recipe)
        self._make = jax.jit(lambda: make_state(recipe))
        step = make_step(recipe, axis_name="data")
        self._train = jax.pmap(step, axis_name="data", in_axes=(0, 0, None), devices=self._devices, donate_argnums=0)
        self._eval = jax.jit(make_eval_step(recipe))

    def rows(self, total: int) -> np.ndarray:
        """All rows of a batch: there is one process."""
        return np.arange(total)

    @property
    def sizes(self) -> Mapping[str, int]:
        """As of a mesh that splits rows alone."""
        return mesh_sizes({"data": len(self._devices)}, len(self._devices))

    def whole_rows(self, rows: int) -> int:
        """As that of `MeshPlacement`: there is one process."""
        return rows

    def describe(self) -> str:
        """How many copies."""
        return f"pmap: data {len(self._devices)}"

    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of one copy of the state."""
        return self._shapes

    def new_state(self) -> TrainState:
        """The state before the first step, one copy."""
        return self._make()

    def spread(self, state: TrainState) -> TrainState:
        """A copy for each device, stacked on a leading axis."""
        count = len(self._devices)
        mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=self._devices)
        sharding = NamedSharding(mesh, PartitionSpec("data"))  # as pmap gives it back: another would compile it again
        # One copy after the other: the first device need not hold them all.
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback((count, *leaf.shape), sharding, lambda _, a=leaf: a[None]), state
        )

    def whole(self, state: TrainState) -> TrainState:
        """The copy of the first device: all are alike."""
        return jax.tree.map(lambda copies: copies.addressable_data(0)[0], state)

    def train_step(
        self, state: TrainState, batch: HostBatch, limit: np.float32 | None = None
    ) -> tuple[TrainState, Metrics]:
        """As that of `MeshPlacement`."""
        count = len(self._devices)
        parts = {name: array.reshape(count, -1, *array.shape[1:]) for name, array in batch.items()}
        state, metrics = self._train(state, parts, limit)
        return state, jax.tree.map(lambda copies: copies[0], metrics)

    def eval_step(self, params: Any, batch: HostBatch) -> Metrics:
        """Sums over a batch, on the first device."""
        return self._eval(params, {name: jnp.asarray(array) for name, array in batch.items()})

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """As that of `MeshPlacement`: the program of one device and its rows."""
        count = len(self._devices)
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), self._shapes)
        parts = {
            name: jax.ShapeDtypeStruct((count, array.shape[0] // count, *array.shape[1:]), array.dtype)
            for name, array in batch.items()
        }
        return self._train.lower(state, parts, None)


def placed_shapes(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and places of a batch of arrays, or of what has their shape."""

    def shape(array):
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        return jax.ShapeDtypeStruct(array.shape, dtype, sharding=batch_sharding(mesh, array.ndim))

    return {name: shape(array) for name, array in batch.items()}


Placement = MeshPlacement | PmapPlacement
"""what `place` gives"""

PLACEMENTS: dict[str, type[MeshPlacement] | type[PmapPlacement]] = {"mesh": MeshPlacement, "pmap": PmapPlacement}
"""placements by parallel.kind"""


def place(recipe: Recipe, make_step: MakeStep = make_train_step) -> Placement:
    """The pure step that `make_step` makes of the recipe, on the devices that its `parallel` names. ConfigError if they
    don't fit.
    """
    return PLACEMENTS[recipe.parallel.kind](recipe, make_step=make_step)


def _chosen(recipe: Recipe) -> list[jax.Device]:
    """The devices of all processes that a recipe asks for."""
    if jax.process_count() > 1 and recipe.parallel.devices is not None:
        raise ConfigError(
            f"parallel.devices ({recipe.parallel.devices}) chooses among the devices of one process, but "
            f"{jax.process_count()} train together, with {jax.device_count()}. Leave it out, or start fewer processes."
        )
    return recipe.parallel.choose(jax.devices())


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _filled_up(batch: HostBatch, ways: int) -> HostBatch:
    rows = len(batch["weights"])
    missing = -rows % ways
    if not missing:
        return batch
    filled = {name: np.concatenate([array, np.repeat(array[-1:], missing, 0)]) for name, array in batch.items()}
    filled["weights"][rows:] = 0
    return filled
