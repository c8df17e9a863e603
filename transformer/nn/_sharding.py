"""Where parameters and batches lie: meshes, and a table from parameter paths to mesh axes.

A mesh is a grid of devices with named axes (GSPMD, Xu et al. 2021, arXiv 2105.04663):

- `data` splits the rows of a batch;
- `fsdp` splits them too, and every parameter, gradient and optimizer state with them (Rajbhandari et al. 2020, arXiv
  1910.02054, stage 3);
- `tensor` splits heads, feed-forward widths and vocabulary (Shoeybi et al. 2019, arXiv 1909.08053, section 3);
- `context` splits the length of sequences;
- `expert` splits the experts of a routed feed-forward, and rows of the batch elsewhere.

`state_shardings` also serves a mesh with other axes: give `rules`, pairs of a logical axis of `PARAMETER_AXES` and the
mesh axis that splits it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import transformer.nn.models  # noqa: F401 - declares the axes of their parameters
from transformer.config._checks import ConfigError, check_choice
from transformer.config._model import TransformerConfig
from transformer.nn._parameter_axes import parameter_axes
from transformer.nn._partitioning import AxisRules, current_rules, split_axes

AXES = ("data", "fsdp", "expert", "context", "tensor")
"""mesh axes, those that talk most last: neighbors in the list of devices are the best connected"""

BATCH_AXES = ("data", "fsdp", "expert")
"""mesh axes that split the rows of a batch"""

PARAMETER_AXES: dict[str, str] = {
    "embed": "fsdp",
    "heads": "tensor",
    "feed_forward": "tensor",
    "vocab": "tensor",
    "expert": "expert",
}
"""logical axis of a parameter -> the mesh axis that splits it, unless `rules` say otherwise"""


ParallelKind = Literal["mesh", "pmap"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Over which devices a run is spread, and how. It changes speed and memory, never the result beyond rounding.

    Raises:
        ConfigError: sizes that can't be, or a pmap that is asked for more than rows.
    """

    kind: ParallelKind = "mesh"
    """mesh: one program over a grid of devices, jit; pmap: a copy of the model on every local device, rows split"""
    data: int = -1
    """devices that split the rows of a batch; -1: what the other axes leave"""
    fsdp: int = 1
    """devices that split rows, and with them parameters, gradients and optimizer state"""
    tensor: int = 1
    """devices that split heads, feed-forward width and vocabulary"""
    context: int = 1
    """devices that split the length of sequences"""
    expert: int = 1
    """devices that split the experts of a routed feed-forward, and rows elsewhere"""
    devices: int | None = None
    """use the first so many devices; None: all there are"""
    coordinator: str | None = None
    """host:port of process 0, of several that train together; auto: JAX asks the cluster; None: as Slurm, Open MPI or a
    TPU slice says, else one process"""
    num_processes: int | None = None
    """how many train together, with a coordinator"""
    process_id: int | None = None
    """which of them this one is, from 0"""
    patience: int = 300
    """seconds to wait for the other processes at the start"""

    def __post_init__(self):
        check_choice("parallel.kind", self.kind, ParallelKind.__args__)
        self._check_processes()
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
                raise ConfigError(f"parallel.{axis} must be at least 1, or -1 for what is left, got {size!r}.")
        if self.devices is not None and (not isinstance(self.devices, int) or self.devices < 1):
            raise ConfigError(f"parallel.devices must be an integer of at least 1, or None, got {self.devices!r}.")
        split = [axis for axis, size in self.sizes.items() if axis != "data" and size != 1]
        if self.kind == "pmap" and split:
            raise ConfigError(
                f"parallel.kind pmap splits the rows of a batch and nothing else, but parallel.{split[0]} is "
                f"{self.sizes[split[0]]}. Leave it out, or take parallel.kind mesh."
            )

    def _check_processes(self) -> None:
        ids = (self.num_processes, self.process_id)
        if self.coordinator in (None, "auto"):
            if ids != (None, None):
                raise ConfigError(
                    "parallel.num_processes and parallel.process_id go with parallel.coordinator, the host and port of "
                    "process 0: --parallel.coordinator 10.0.0.1:1234. Leave them out where one process trains alone."
                )
        else:
            host, _, port = self.coordinator.rpartition(":")
            plain = ":" not in host or (host.startswith("[") and host.endswith("]"))  # an IPv6 address in brackets
            if not host or not plain or not port.isdecimal() or not 0 < int(port) < 2**16:
                raise ConfigError(
                    f"parallel.coordinator must be host:port of process 0, such as 10.0.0.1:1234, or auto, got "
                    f"{self.coordinator!r}."
                )
            if None in ids or not 0 <= self.process_id < self.num_processes:
                raise ConfigError(
                    f"parallel.coordinator needs parallel.num_processes, and parallel.process_id from 0 to one less, "
                    f"got {self.num_processes} and {self.process_id}."
                )
        if not 1 <= self.patience <= 10**6:
            raise ConfigError(f"parallel.patience must be 1 to 1,000,000 seconds, got {self.patience}.")

    @property
    def sizes(self) -> dict[str, int]:
        """Wanted size of each axis of the mesh."""
        return {axis: getattr(self, axis) for axis in AXES}

    def choose(self, devices: Sequence[jax.Device]) -> list[jax.Device]:
        """The devices to use of those there are. ConfigError when there are fewer than `devices`."""
        if self.devices is not None and self.devices > len(devices):
            raise ConfigError(
                f"parallel.devices is {self.devices}, but there are {len(devices)} devices. Give at most so many. "
                f"(Simulated ones on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={self.devices})"
            )
        return list(devices)[: self.devices]


def mesh_sizes(wanted: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Sizes of all axes for so many devices; at most one -1 in `wanted` takes what the others leave.

    Raises:
        ConfigError: an unknown axis, more than one -1, or a product that is not the number of devices.
    """
    unknown = [name for name in wanted if name not in AXES]
    if unknown:
        raise ConfigError(f"there is no mesh axis {unknown[0]!r}: use {', '.join(AXES)}.")
    sizes = {axis: wanted.get(axis, 1) for axis in AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(f"only one mesh axis can be -1 (what is left), got {' and '.join(free)}. Give a size to one.")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    told = told_sizes(sizes) or "all axes 1"
    if free and num_devices % fixed == 0:
        return sizes | {free[0]: num_devices // fixed}
    if free or fixed != num_devices:
        divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ConfigError(
            f"the mesh {told} needs {'a multiple of ' if free else ''}{fixed} devices, but there are {num_devices}. "
            f"Sizes must multiply to {num_devices}: each is one of {', '.join(map(str, divisors))}."
        )
    return sizes


def told_sizes(sizes: Mapping[str, int]) -> str:
    """The axes that split something, "data 4 x tensor 2"; "" where none does."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def make_mesh(wanted: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of these devices (None: all) with every axis of `AXES`. ConfigError as `mesh_sizes`."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(wanted, len(devices))
    shape, names, types = tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, names, axis_types=types, devices=devices)
    except NotImplementedError:  # sizes that cut an axis of the torus in parts, which it does on a v5e alone
        return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), names, types)


def check_model(config: TransformerConfig, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError when a part of the model that the mesh would split does not divide."""
    needs = (
        ("num_heads", config.num_heads, "tensor"),
        ("d_ff", config.feed_forward_width, "tensor"),
        ("d_model", config.d_model, "fsdp"),
    )
    for field, size, axis in needs:
        if size % sizes[axis]:
            fit = [n for n in range(1, size + 1) if size % n == 0 and n <= 2 * sizes[axis]]
            raise ConfigError(
                f"model.{field} ({size}) must be a multiple of parallel.{axis} ({sizes[axis]}), which splits it. "
                f"parallel.{axis} may be {', '.join(map(str, fit))}; or change model.{field}."
            )


def row_ways(sizes: Mapping[str, int]) -> int:
    """Into how many parts a mesh of these sizes splits the rows of a batch."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def check_batch_sizes(field: str, rows: int, accumulation: int, sizes: Mapping[str, int], length: int | None) -> None:
    """Raises ConfigError when `rows`, of data.`field`, or the length of sequences, can't be dealt out evenly."""
    ways = row_ways(sizes)
    if rows % (ways * accumulation):
        micro = f" x training.accumulation ({accumulation})" if accumulation > 1 else ""
        raise ConfigError(
            f"data.{field} ({rows}) must be a multiple of the {ways} parts that rows are split into "
            f"(data x fsdp x expert){micro}. The nearest are {_nearest_multiples(rows, ways * accumulation)}; or "
            f"let fewer devices share it: --parallel.devices."
        )
    if length is not None and length % sizes["context"]:
        raise ConfigError(
            f"sequences of {length} tokens must be a multiple of parallel.context ({sizes['context']}), which splits "
            f"them. The nearest lengths are {_nearest_multiples(length, sizes['context'])}."
        )


def _nearest_multiples(size: int, factor: int) -> str:
    below = size // factor * factor
    return " and ".join(str(n) for n in (below, below + factor) if n)


def parameter_spec(
    path: str, shape: Sequence[int], sizes: Mapping[str, int], rules: AxisRules | None = None
) -> PartitionSpec:
    """How the parameter at `path` is split over a mesh of these `sizes`; `rules` as for `state_shardings`. A parameter
    whose axes are not declared is replicated.
    """
    return _spec(parameter_axes(path, shape), shape, sizes, rules)


def _spec(
    names: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int], rules: AxisRules | None
) -> PartitionSpec:
    axes = split_axes(names, sizes, PARAMETER_AXES.items() if (found := rules_in_force(rules)) is None else found)
    axes = [split or () for split in axes]
    fits = [size % math.prod(sizes[axis] for axis in split) == 0 for split, size in zip(axes, shape, strict=False)]
    return PartitionSpec(*(_entry(split) if fit else None for split, fit in zip(axes, fits, strict=True)))


def rules_in_force(rules: AxisRules | None) -> AxisRules | None:
    """These rules, else those that activations follow: of `partitioning.axis_rules` or of `nn.logical_axis_rules`. None
    when there are none. ConfigError: rules that are no pairs.
    """
    if rules is None:
        return current_rules()
    for rule in [rules] if isinstance(rules, Mapping | str) else rules:
        target = rule[1] if isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str) else 0
        if not (target is None or isinstance(target, str | tuple | list)):
            raise ConfigError(
                f"rules must be pairs of a logical axis and a mesh axis, a tuple of them or None, such as "
                f"[('embed', 'fsdp'), ('heads', None)], got {rule!r}. For a dict, pass tuple(rules.items())."
            )
    return rules


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes if len(axes) > 1 else axes[0] if axes else None


def state_shardings(state: Any, mesh: Mesh, rules: AxisRules | None = None) -> Any:
    """A `NamedSharding` for each leaf of a tree: parameters, a `flax.training.train_state.TrainState`, or any tree in
    which the paths of parameters occur, of arrays or `jax.ShapeDtypeStruct`s.

    A leaf that is no parameter of this library (a step count, a PRNG key) is replicated, and so is an axis whose size
    the mesh axis does not divide. A leaf boxed by `with_logical_axes` or by Flax has the axes of its box.

    Args:
        state: the tree; `jax.eval_shape` makes one without allocating arrays.
        mesh: any mesh. Axes that only the rules name are ignored.
        rules: which mesh axes split the logical axes "embed", "heads", "feed_forward", "vocab", "expert", "layers" and
            any that a module of yours declares (`parameter_axes.declare`), such as `[("embed", "fsdp"), ("heads",
            ("tp", "sp"))]`; the form is that of `nn.logical_axis_rules`. None: those in force
            (`partitioning.axis_rules` or `nn.logical_axis_rules`), or else `PARAMETER_AXES`.

    Raises:
        ConfigError: rules of another form.
    """

    def sharding(path, leaf):
        if isinstance(leaf, nn.Partitioned):
            return NamedSharding(mesh, _spec(leaf.names, leaf.value.shape, mesh.shape, rules))
        return NamedSharding(mesh, parameter_spec(_name(path), getattr(leaf, "shape", ()), mesh.shape, rules))

    return jax.tree_util.tree_map_with_path(sharding, state, is_leaf=_is_box)


def with_logical_axes(tree: Any) -> Any:
    """The tree with each parameter in an `nn.LogicallyPartitioned` box that names its axes, so that Flax's own tools
    place it: `nn.get_partition_spec`, then `nn.logical_to_mesh_sharding`. Leaves without declared axes, and boxes, stay
    as they are. `nn.meta.unbox` takes the boxes off; a model's `apply` takes parameters with and without them.
    """

    def box(path, leaf):
        names = () if _is_box(leaf) else parameter_axes(_name(path), getattr(leaf, "shape", ()))
        return nn.LogicallyPartitioned(leaf, names) if names else leaf

    return jax.tree_util.tree_map_with_path(box, tree, is_leaf=_is_box)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.Partitioned)


def _name(path: tuple[Any, ...]) -> str:
    if path and getattr(path[-1], "name", None) == "value":  # the array inside an NNX variable
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def batch_sharding(mesh: Mesh, ndim: int, rules: AxisRules | None = None) -> NamedSharding:
    """Of an array of a batch with `ndim` axes, the first of them rows, logical axis "batch", the second, if there is
    one, "length". By default rows are split over data, fsdp and expert, length over context; `rules` as for
    `state_shardings`.
    """
    given = (("batch", BATCH_AXES), ("length", "context")) if (found := rules_in_force(rules)) is None else found
    rows, *length = split_axes(("batch", "length")[:ndim], mesh.shape, given)
    return NamedSharding(mesh, PartitionSpec(rows or None, *(_entry(split or ()) for split in length)))


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Which rows of a batch the devices of this process hold, ascending: all of them where there is one process."""
    parts = batch_sharding(mesh, 1).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[part] for part in parts]))


def place_batch(
    batch: Mapping[str, np.ndarray], mesh: Mesh, rows: np.ndarray | None = None, batch_size: int | None = None
) -> dict[str, jax.Array]:
    """The arrays of a global batch, each device holding its part.

    Every process gives the whole batch, or only its `rows` (of `local_rows`) of one of `batch_size`.

    Raises:
        ConfigError: sequences whose length the mesh can't split evenly.
    """
    for name, array in batch.items():
        if array.ndim > 1 and array.shape[1] % mesh.shape.get("context", 1):
            raise ConfigError(
                f"{name} is {array.shape[1]} tokens long, which parallel.context ({mesh.shape['context']}) can't split "
                f"evenly. The nearest lengths are {_nearest_multiples(array.shape[1], mesh.shape['context'])}: give "
                f"them as data.sequence_length, or data.max_source_length and data.max_target_length."
            )

    def place(array: np.ndarray) -> jax.Array:
        def part(index):
            if rows is None:
                return array[index]
            first, last = index[0].indices(batch_size)[:2]
            begin = np.searchsorted(rows, first)
            return array[begin : begin + last - first][:, *index[1:]]

        size = len(array) if rows is None else batch_size
        return jax.make_array_from_callback((size, *array.shape[1:]), batch_sharding(mesh, array.ndim), part)

    return {name: place(array) for name, array in batch.items()}
