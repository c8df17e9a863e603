"""Placement of the training step on devices: one program over a mesh (jit), or a replica on each device (pmap)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.data._config import shared_rows
from transformer.nn import _sharding as meshes
from transformer.nn._parameter_axes import LAYERS, axes_of
from transformer.nn.quantization._schemes import INSTALL, Quantization, is_installed
from transformer.training._recipe import Recipe
from transformer.training._state import TrainState, abstract_state, initial_params, make_state
from transformer.training._step import Metrics, TrainStep, make_eval_step, make_train_step

FP8_CAPABILITY = 8.9
"""lowest CUDA compute capability with multiplications in float8_e4m3fn (Ada; Hopper has 9.0)"""


def check_quantization(recipe: Recipe, devices: Sequence[Any]) -> None:
    """Check that `execution.quantization` is possible: the package, the devices, and the paths that it selects.

    ConfigError if qwix is not installed, a GPU lacks multiplications in fp8, or one of `quantization_paths` is in no
    path of a kernel; the message lists the paths.
    """
    name = recipe.execution.quantization
    if name == "none":
        return
    if not is_installed():
        raise ConfigError(
            f"execution.quantization {name} needs the package qwix, which is not installed. Install it, {INSTALL}, or "
            f"set execution.quantization to none."
        )
    capability = getattr(devices[0], "compute_capability", None) if devices[0].platform in ("gpu", "cuda") else None
    if name.startswith("fp8") and capability is not None and float(capability) < FP8_CAPABILITY:
        raise ConfigError(
            f"execution.quantization {name} needs a GPU of compute capability {FP8_CAPABILITY} or higher (Ada, "
            f"Hopper), but {devices[0].device_kind} has {capability}. Set execution.quantization to "
            f"{name.replace('fp8', 'int8')}."
        )
    check_paths(recipe)


def check_paths(recipe: Recipe) -> None:
    """Raise a ConfigError if one of `execution.quantization_paths` selects no kernel of the layers."""
    if not recipe.execution.quantization_paths:
        return
    kernels = quantizable(recipe)
    for part in recipe.execution.quantization_paths:
        one = dataclasses.replace(recipe.execution, quantization_paths=(part,))
        if not any(Quantization.of(one).at(*path.split("/")) for path in kernels):
            raise ConfigError(
                f"execution.quantization_paths must be parts of the paths of kernels in the layers, but no path "
                f"contains {part!r}. Choose parts of: {', '.join(kernels)}."
            )


def quantizable(recipe: Recipe) -> list[str]:
    """Return the paths of the kernels whose multiplications can be quantized: hidden matrices of the layers."""
    plain = dataclasses.replace(recipe.execution, quantization="none", quantization_paths=())
    shapes = jax.eval_shape(lambda: initial_params(dataclasses.replace(recipe, execution=plain)))
    paths = {path: axes_of(path, leaf.ndim) for path, leaf in flatten_dict(shapes, sep="/").items()}
    in_layers = (LAYERS, "prefix_", "suffix_")
    return [
        path
        for path, axes in paths.items()
        if axes is not None and axes.role == "hidden" and any(part.startswith(in_layers) for part in path.split("/"))
    ]


MakeStep = Callable[..., TrainStep]
"""function that makes a pure step from a recipe and, for `jax.pmap`, an `axis_name`, such as `make_train_step`"""
HostBatch = Mapping[str, np.ndarray]
"""arrays on the host, by name; for training, only the rows of this process (`rows`), otherwise the whole batch"""


class MeshPlacement:
    """One `jax.jit` program over a mesh of devices; XLA inserts the communication (GSPMD, arXiv 2105.04663).

    ConfigError if the mesh does not fit the devices, the model or the batch.
    """

    def __init__(self, recipe: Recipe, devices: Sequence[Any] | None = None, make_step: MakeStep = make_train_step):
        """Check the mesh and prepare the functions, which are compiled at their first call.

        `devices` are those to choose from; None: those of this machine. Devices of a topology are for compilation only.
        """
        devices = _chosen(recipe) if devices is None else recipe.parallel.choose(devices)
        sizes = meshes.mesh_sizes(recipe.parallel.sizes, len(devices))
        meshes.check_model(recipe.model, sizes)
        check_quantization(recipe, devices)
        length = getattr(recipe.data, "sequence_length", None)
        meshes.check_batch_sizes(*shared_rows(recipe.data), recipe.training.accumulation, sizes, length)
        _check_offload(recipe, devices)
        self._dcn = recipe.parallel.dcn
        self.mesh: Mesh = meshes.make_mesh(sizes, devices, self._dcn)
        make = functools.partial(make_state, recipe)
        with jax.set_mesh(self.mesh):  # the same mesh context as in `new_state`, so that JAX traces `make` only once
            shapes = jax.eval_shape(make)
        self._shardings = meshes.state_shardings(shapes, self.mesh)
        step = make_step(recipe)
        if recipe.parallel.optimizer_memory_host_offload:
            step = _with_offloaded_optimizer(step, self._shardings.opt_state)
            host = meshes.offloaded(self._shardings.opt_state, shapes.opt_state)
            self._shardings = self._shardings.replace(opt_state=host)
        self._shapes = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, self._shardings
        )
        self._make = jax.jit(make, out_shardings=self._shardings)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        self._train = jax.jit(step, donate_argnums=0, out_shardings=(self._shardings, everywhere))
        self._eval = jax.jit(make_eval_step(recipe), out_shardings=everywhere)
        ways = meshes.num_row_shards(self.mesh.shape)
        self._parts = len(self.rows(ways)), ways

    def rows(self, total: int) -> np.ndarray:
        """Return the indices of the rows that this process supplies of a training batch of `total` rows, ascending."""
        return meshes.local_rows(self.mesh, total)

    @property
    def devices(self) -> list[jax.Device]:
        """Devices of all processes, in the order of the program."""
        return list(self.mesh.devices.flat)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of every mesh axis."""
        return self.mesh.shape

    def whole_rows(self, rows: int) -> int:
        """Return the number of rows of the whole batch, given the number of rows of this process."""
        own, ways = self._parts
        return rows * ways // own

    def describe(self) -> str:
        """Return the mesh axes larger than 1, such as "mesh: data 4 x tensor 2"; "" on one device."""
        axes = meshes.describe_sizes(self.mesh.shape, self._dcn)
        return f"mesh: {axes}" if axes else ""

    def abstract_state(self) -> TrainState:
        """Return the shapes, dtypes and shardings of the state, as the target of restoring a checkpoint."""
        return self._shapes

    def new_state(self) -> TrainState:
        """Create the state before the first step; each device computes its own shards."""
        with jax.set_mesh(self.mesh):
            return self._make()

    def spread(self, state: TrainState) -> TrainState:
        """Convert a new or restored state to the form that `train_step` takes."""
        return state

    def whole(self, state: TrainState) -> TrainState:
        """Convert the state of `train_step` to the form for checkpoints, evaluation and users."""
        return state

    def train_step(
        self, state: TrainState, batch: HostBatch, limit: np.float32 | None = None
    ) -> tuple[TrainState, Metrics]:
        """Run one training step on the rows of this process; the input state is donated and must not be used again.

        `limit`: skip the update if the mean loss is above this (in the unit of the loss); None: no limit.
        """
        with jax.set_mesh(self.mesh):
            own, ways = self._parts
            total = self.whole_rows(len(batch["weights"]))
            placed = meshes.place_batch(batch, self.mesh, None if own == ways else self.rows(total), total)
            return self._train(state, placed, limit)

    def eval_step(self, params: PyTree, batch: HostBatch, reference: PyTree = None) -> Metrics:
        """Compute sums over a batch of any number of rows, which is padded with rows of weight 0."""
        filled = _filled_up(batch, meshes.num_row_shards(self.mesh.shape))
        with jax.set_mesh(self.mesh):
            return self._eval(params, meshes.place_batch(filled, self.mesh), reference)

    def shapes(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes, dtypes and shardings of a batch of arrays or shapes."""

        def shape(array):
            dtype = jax.dtypes.canonicalize_dtype(array.dtype)
            return jax.ShapeDtypeStruct(array.shape, dtype, sharding=meshes.batch_sharding(self.mesh, array.ndim))

        return {name: shape(array) for name, array in batch.items()}

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Lower the training step for a batch of arrays or shapes, to compile and inspect it without running it."""
        with jax.set_mesh(self.mesh):
            return self._train.lower(self._shapes, self.shapes(batch))


class PmapPlacement:
    """A replica of the model on each local device (`jax.pmap`): the rows of a batch are split, gradients are summed.

    ConfigError if the devices can't divide the rows of the batch evenly, or there are several processes.
    """

    def __init__(self, recipe: Recipe, devices: Sequence[Any] | None = None, make_step: MakeStep = make_train_step):
        """Prepare the functions; the arguments are those of `MeshPlacement`."""
        if jax.process_count() > 1:
            raise ConfigError(
                f"parallel.kind pmap supports a single process, but this run has {jax.process_count()} processes. Use "
                f"--parallel.kind mesh: with all axes except data at 1 it does the same over all processes."
            )
        self._devices = recipe.parallel.choose(jax.local_devices() if devices is None else devices)
        check_quantization(recipe, self._devices)
        _check_offload(recipe, self._devices)
        count = len(self._devices)
        if recipe.parallel.data not in (-1, count):
            raise ConfigError(
                f"parallel.data is {recipe.parallel.data}, but pmap runs on all {count} devices. Remove it, or set "
                f"parallel.devices to {recipe.parallel.data}."
            )
        meshes.check_batch_sizes(
            *shared_rows(recipe.data), recipe.training.accumulation, meshes.mesh_sizes({"data": count}, count), None
        )
        self._shapes = abstract_state(recipe)
        self._make = jax.jit(lambda: make_state(recipe))
        step = make_step(recipe, axis_name="data")
        self._train = jax.pmap(step, axis_name="data", in_axes=(0, 0, None), devices=self._devices, donate_argnums=0)
        self._eval = jax.jit(make_eval_step(recipe))

    def rows(self, total: int) -> np.ndarray:
        """Return the indices of all rows of a batch, because there is only one process."""
        return np.arange(total)

    @property
    def devices(self) -> list[jax.Device]:
        """Devices of this process, in the order of the program."""
        return list(self._devices)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of every mesh axis, for a mesh that splits only the rows."""
        return meshes.mesh_sizes({"data": len(self._devices)}, len(self._devices))

    def whole_rows(self, rows: int) -> int:
        """Return the number of rows unchanged, because there is only one process."""
        return rows

    def describe(self) -> str:
        """Return the number of replicas, such as "pmap: data 4"."""
        return f"pmap: data {len(self._devices)}"

    def abstract_state(self) -> TrainState:
        """Return the shapes and dtypes of one replica of the state."""
        return self._shapes

    def new_state(self) -> TrainState:
        """Create one replica of the state before the first step."""
        return self._make()

    def spread(self, state: TrainState) -> TrainState:
        """Replicate a state: one copy per device, stacked on a leading axis."""
        count = len(self._devices)
        mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=self._devices)
        # The sharding of pmap's outputs: with any other one, the second step would compile the program again.
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        # Copies are made one after another; stacking them first would need memory for all copies on one device.
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback((count, *leaf.shape), sharding, lambda _, a=leaf: a[None]), state
        )

    def whole(self, state: TrainState) -> TrainState:
        """Return the replica of the first device; all replicas are equal."""
        return jax.tree.map(lambda copies: copies.addressable_data(0)[0], state)

    def train_step(
        self, state: TrainState, batch: HostBatch, limit: np.float32 | None = None
    ) -> tuple[TrainState, Metrics]:
        """Run one training step, as `MeshPlacement.train_step`."""
        count = len(self._devices)
        parts = {name: array.reshape(count, -1, *array.shape[1:]) for name, array in batch.items()}
        state, metrics = self._train(state, parts, limit)
        return state, jax.tree.map(lambda copies: copies[0], metrics)

    def eval_step(self, params: PyTree, batch: HostBatch, reference: PyTree = None) -> Metrics:
        """Compute sums over a batch, on the first device."""
        return self._eval(params, {name: jnp.asarray(array) for name, array in batch.items()}, reference)

    def shapes(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the rows of one device."""
        parts = {name: (array.shape[0] // len(self._devices), *array.shape[1:]) for name, array in batch.items()}
        return {name: jax.ShapeDtypeStruct(shape, batch[name].dtype) for name, shape in parts.items()}

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Lower the training step, as `MeshPlacement.lower`; the program is that of one device with its rows."""
        both = self._shapes, self.shapes(batch)
        one_more = (len(self._devices),)
        both = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(one_more + leaf.shape, leaf.dtype), both)
        return self._train.lower(*both, None)


Placement = MeshPlacement | PmapPlacement
"""result of `place`"""

PLACEMENTS: dict[str, type[MeshPlacement] | type[PmapPlacement]] = {"mesh": MeshPlacement, "pmap": PmapPlacement}
"""placement classes by parallel.kind"""


def place(recipe: Recipe, make_step: MakeStep = make_train_step) -> Placement:
    """Place the recipe's training step on the devices that its `parallel` config selects.

    Args:
        recipe: recipe of the run.
        make_step: makes the pure training step.

    Raises:
        ConfigError: the devices don't fit the model or the batch.
    """
    return PLACEMENTS[recipe.parallel.kind](recipe, make_step=make_step)


def _chosen(recipe: Recipe) -> list[jax.Device]:
    """Return the devices of all processes that a recipe selects."""
    if jax.process_count() > 1 and recipe.parallel.devices is not None:
        raise ConfigError(
            f"parallel.devices ({recipe.parallel.devices}) selects devices of a single process, but this run has "
            f"{jax.process_count()} processes with {jax.device_count()} devices. Remove it, or start fewer processes."
        )
    return recipe.parallel.choose(jax.devices())


def _check_offload(recipe: Recipe, devices: Sequence[Any]) -> None:
    """Raise a ConfigError if the recipe uses host memory, and the devices can't."""
    if recipe.parallel.optimizer_memory_host_offload:
        meshes.check_host_memory(devices, "--parallel.optimizer-memory-host-offload")
    if recipe.execution.remat == "offload":
        meshes.check_host_memory(devices, "--execution.remat offload")


def _with_offloaded_optimizer(step: TrainStep, on_devices: PyTree) -> TrainStep:
    """Return the step with the optimizer state copied to `on_devices`; its output shardings copy it back."""

    def copied(state, batch, limit=None):
        return step(state.replace(opt_state=jax.device_put(state.opt_state, on_devices)), batch, limit)

    return copied


def _filled_up(batch: HostBatch, ways: int) -> HostBatch:
    """Pad a batch to a multiple of `ways` rows: repeat its last row, a valid input unlike zeros, with weight 0."""
    rows = len(batch["weights"])
    missing = -rows % ways
    if not missing:
        return batch
    filled = {name: np.concatenate([array, np.repeat(array[-1:], missing, 0)]) for name, array in batch.items()}
    filled["weights"][rows:] = 0
    return filled
