"""Sharding of parameters and batches: meshes, and rules from logical axes to mesh axes.

A mesh is a grid of devices with named axes (GSPMD, Xu et al. 2021, arXiv 2105.04663):

- `data` splits the rows of a batch;
- `fsdp` splits the rows too, and also every parameter, gradient and optimizer state (Rajbhandari et al. 2020, arXiv
  1910.02054, stage 3);
- `tensor` splits heads, feed-forward widths and the vocabulary (Shoeybi et al. 2019, arXiv 1909.08053, section 3);
- `context` splits the length of sequences;
- `expert` splits the experts of a mixture-of-experts layer, and the rows of the batch elsewhere.

The devices may form several slices, which only the slow data-center network (DCN) connects. An axis then has a part
within a slice and a part across slices, and its size is the product of both.

`state_shardings` also supports a mesh with other axes: pass `rules`, pairs of a logical axis of `PARAMETER_AXES` and
the mesh axis that splits it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
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
from transformer.nn._axes import PyTree
from transformer.nn._parameter_axes import parameter_axes
from transformer.nn._partitioning import AxisRules, check_rules, current_rules, split_axes

AXES = ("data", "fsdp", "expert", "context", "tensor")
"""mesh axes; those with the most communication come last, because neighboring devices have the fastest connection"""

HOST_MEMORY = "pinned_host"
"""JAX's memory kind of host memory that devices access directly"""

BATCH_AXES = ("data", "fsdp", "expert")
"""mesh axes that split the rows of a batch"""

PARAMETER_AXES: dict[str, str | None] = {
    "embed": "fsdp",
    "heads": "tensor",
    "feed_forward": "tensor",
    "vocab": "tensor",
    "expert": "expert",
    "norm": None,  # communicating a vector in each layer and pass would cost more time than its memory is worth
}
"""logical axis of a parameter -> the mesh axis that splits it, or None, unless `rules` are given"""


ParallelKind = Literal["mesh", "pmap"]


@dataclass(frozen=True, kw_only=True)
class DcnConfig:
    """Sizes of the mesh axes across slices, which the data-center network (DCN) connects.

    Their product is the number of slices. `data` communicates least.

    Raises:
        ConfigError: a size that is not an integer of at least 1.
    """

    data: int = 1
    """number of slices that split the rows of a batch"""
    fsdp: int = 1
    """number of slices that split rows, parameters, gradients and optimizer state"""
    tensor: int = 1
    """number of slices that split heads, feed-forward width and vocabulary"""
    context: int = 1
    """number of slices that split the length of sequences"""
    expert: int = 1
    """number of slices that split the experts of a mixture-of-experts layer, and rows elsewhere"""

    def __post_init__(self):
        for axis, size in self.sizes.items():
            # bool is a subclass of int: without this check True would pass as the size 1.
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"parallel.dcn.{axis} must be an integer of at least 1, got {size!r}.")

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis across slices."""
        return {axis: getattr(self, axis) for axis in AXES}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How to distribute a run over devices. It changes speed and memory; results differ only by rounding.

    The sizes of the axes are those within a slice; `dcn` multiplies them.

    Raises:
        ConfigError: impossible sizes, or kind "pmap" with anything other than data parallelism.
    """

    kind: ParallelKind = "mesh"
    """mesh: one jitted program over a grid of devices; pmap: data parallelism, a copy of the model per local device"""
    data: int = -1
    """number of devices that split the rows of a batch; -1: all remaining devices"""
    fsdp: int = 1
    """number of devices that split rows, parameters, gradients and optimizer state"""
    tensor: int = 1
    """number of devices that split heads, feed-forward width and vocabulary"""
    context: int = 1
    """number of devices that split the length of sequences"""
    expert: int = 1
    """number of devices that split the experts of a mixture-of-experts layer, and rows elsewhere"""
    dcn: DcnConfig = DcnConfig()
    """sizes of the axes across slices, by which those within a slice are multiplied"""
    optimizer_memory_host_offload: bool = False
    """keep the optimizer state in host memory, and copy it to the devices for the update"""
    devices: int | None = None
    """number of devices to use, from the start of JAX's list; None: all"""
    coordinator: str | None = None
    """host:port of process 0 in multi-process training;
    auto: JAX detects it;
    None: taken from Slurm, Open MPI or the TPU slice if there is one, otherwise a single process"""
    num_processes: int | None = None
    """number of processes, if a coordinator is given"""
    process_id: int | None = None
    """index of this process, from 0"""
    patience: int = 300
    """seconds to wait at startup for the other processes"""

    def __post_init__(self):
        check_choice("parallel.kind", self.kind, ParallelKind.__args__)
        self._check_processes()
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
                raise ConfigError(f"parallel.{axis} must be at least 1, or -1 for all remaining devices, got {size!r}.")
        if self.devices is not None and (not isinstance(self.devices, int) or self.devices < 1):
            raise ConfigError(f"parallel.devices must be an integer of at least 1, or None, got {self.devices!r}.")
        if self.kind == "pmap":
            self._check_pmap()

    def _check_pmap(self) -> None:
        split = {axis: getattr(self, axis) for axis in AXES if axis != "data" and getattr(self, axis) != 1}
        split |= {f"dcn.{axis}": size for axis, size in self.dcn.sizes.items() if size != 1}
        for name, size in split.items():
            raise ConfigError(
                f"parallel.kind pmap splits only the rows of a batch, over the devices of one process, but "
                f"parallel.{name} is {size}. Remove that option, or use parallel.kind mesh."
            )
        if self.optimizer_memory_host_offload:
            raise ConfigError(
                "parallel.kind pmap keeps the whole state in device memory, but parallel.optimizer_memory_host_offload "
                "is True. Remove that option, or use parallel.kind mesh."
            )

    def _check_processes(self) -> None:
        ids = (self.num_processes, self.process_id)
        if self.coordinator in (None, "auto"):
            if ids != (None, None):
                raise ConfigError(
                    "parallel.num_processes and parallel.process_id require parallel.coordinator, the host and port of "
                    "process 0: --parallel.coordinator 10.0.0.1:1234. Remove them to train with a single process."
                )
        else:
            host, _, port = self.coordinator.rpartition(":")
            # The port follows the last colon. An IPv6 address contains colons too, so it needs brackets: [::1]:1234.
            plain = ":" not in host or (host.startswith("[") and host.endswith("]"))  # an IPv6 address in brackets
            if not host or not plain or not port.isdecimal() or not 0 < int(port) < 2**16:
                raise ConfigError(
                    f"parallel.coordinator must be host:port of process 0, such as 10.0.0.1:1234, or auto, got "
                    f"{self.coordinator!r}."
                )
            if None in ids or not 0 <= self.process_id < self.num_processes:
                raise ConfigError(
                    f"parallel.coordinator needs parallel.num_processes, and a parallel.process_id from 0 to "
                    f"num_processes - 1, got {self.num_processes} and {self.process_id}."
                )
        if not 1 <= self.patience <= 10**6:
            raise ConfigError(f"parallel.patience must be from 1 to 1,000,000 seconds, got {self.patience}.")

    @property
    def sizes(self) -> dict[str, int]:
        """Requested size of each mesh axis: its size within a slice times its size across slices; -1 stays -1."""
        within = {axis: getattr(self, axis) for axis in AXES}
        # A -1 is not multiplied: `mesh_sizes` replaces it by a size over all devices, which already includes the
        # slices.
        return {axis: size if size == -1 else size * self.dcn.sizes[axis] for axis, size in within.items()}

    def choose(self, devices: Sequence[jax.Device]) -> list[jax.Device]:
        """Return the devices to use. Raises ConfigError if fewer than `devices` are available."""
        if self.devices is not None and self.devices > len(devices):
            raise ConfigError(
                f"parallel.devices is {self.devices}, but {len(devices)} devices are available. Use at most that many. "
                f"(To simulate devices on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={self.devices})"
            )
        return list(devices)[: self.devices]


def mesh_sizes(wanted: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Return the sizes of all mesh axes for `num_devices`; at most one -1 in `wanted` is replaced by what remains.

    Raises:
        ConfigError: an unknown axis, more than one -1, or sizes whose product is not the number of devices.
    """
    unknown = [name for name in wanted if name not in AXES]
    if unknown:
        raise ConfigError(f"there is no mesh axis {unknown[0]!r}: use {', '.join(AXES)}.")
    sizes = {axis: wanted.get(axis, 1) for axis in AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(f"only one mesh axis can be -1 (all remaining), got {' and '.join(free)}. Set one of them.")
    # The product of all sizes must be the number of devices, so the free axis gets num_devices / fixed.
    fixed = math.prod(size for size in sizes.values() if size != -1)
    given = describe_sizes(sizes) or "all axes 1"
    if free and num_devices % fixed == 0:
        return sizes | {free[0]: num_devices // fixed}
    if free or fixed != num_devices:
        divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ConfigError(
            f"the mesh {given} needs {'a multiple of ' if free else ''}{fixed} devices, but there are {num_devices}. "
            f"Sizes must multiply to {num_devices}: each is one of {', '.join(map(str, divisors))}."
        )
    return sizes


def describe_sizes(sizes: Mapping[str, int], dcn: DcnConfig = DcnConfig()) -> str:
    """Describe the axes with a size above 1, "data 4 x tensor 2 (data 2 across slices)"; "" if there are none."""
    whole, across = (
        " x ".join(f"{axis} {size}" for axis, size in part.items() if size > 1) for part in (sizes, dcn.sizes)
    )
    return f"{whole} ({across} across slices)" if across else whole


def make_mesh(
    wanted: Mapping[str, int], devices: Sequence[jax.Device] | None = None, dcn: DcnConfig = DcnConfig()
) -> Mesh:
    """Create a mesh of these devices with every axis of `AXES`.

    Args:
        wanted: sizes of the axes, across all slices.
        devices: the devices; None: all.
        dcn: the factor of each size that runs across slices. TPU slices are known from their devices; other devices
            are divided into groups in their order, so that each process belongs to one group.

    Raises:
        ConfigError: as `mesh_sizes`, or `dcn` does not fit the slices, the processes or the sizes.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(wanted, len(devices))
    # Auto: the compiler propagates the shardings of parameters, batch and constraints to all other arrays (GSPMD,
    # section 3). With Explicit axes they would be part of the types of arrays.
    shape, names, types = tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(AXES)
    check_slices(devices, dcn)
    _check_factors(sizes, dcn)
    if dcn != DcnConfig():
        return Mesh(_hybrid_grid(devices, sizes, dcn), names, types)
    try:
        # On a TPU, JAX assigns devices such that neighbors on a mesh axis are neighbors on the torus, as far as
        # possible.
        return jax.make_mesh(shape, names, axis_types=types, devices=devices)
    except NotImplementedError:  # the sizes split an axis of the torus, which JAX refuses by default except on a v5e
        return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), names, types)


def check_slices(devices: Sequence[jax.Device], dcn: DcnConfig) -> None:
    """Raise a ConfigError if the sizes across slices do not fit the slices or the processes of the devices."""
    groups = math.prod(dcn.sizes.values())
    given = " ".join(f"--parallel.dcn.{axis} {size}" for axis, size in dcn.sizes.items() if size > 1)
    if devices[0].platform == "tpu":
        # Devices of a single slice may lack the attribute.
        slices = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
        if len(set(slices.values())) > 1:
            raise ConfigError(
                f"every slice of a mesh must have the same number of devices, but the slices have "
                f"{', '.join(str(slices[index]) for index in sorted(slices))}. Use whole slices: change "
                f"parallel.devices."
            )
        if groups != len(slices):
            fit = f"Pass --parallel.dcn.data {len(slices)}, or other sizes with this product."
            raise ConfigError(
                f"the product of the sizes across slices must be the number of slices, which is {len(slices)}, got "
                f"{given or '1 (no --parallel.dcn options)'}. {fit if len(slices) > 1 else 'Remove these options.'}"
            )
    elif groups > 1:
        # One process can divide its devices into any groups, which simulates slices. Several processes are connected by
        # the network, so a boundary between slices must be a boundary between processes.
        per_process = collections.Counter(device.process_index for device in devices)
        if len(per_process) > 1 and len(per_process) % groups:
            fit = [n for n in range(2, len(per_process) + 1) if len(per_process) % n == 0]
            raise ConfigError(
                f"each process must belong to one slice, but {len(per_process)} processes can't be divided evenly into "
                f"the {groups} slices of {given}. The number of slices can be {', '.join(map(str, fit))}."
            )


def _check_factors(sizes: Mapping[str, int], dcn: DcnConfig) -> None:
    for axis, factor in dcn.sizes.items():
        if sizes[axis] % factor:
            raise ConfigError(
                f"parallel.dcn.{axis} ({factor}) must divide the size of the mesh axis {axis} ({sizes[axis]}), of "
                f"which it is the part across slices. Change parallel.dcn.{axis}, or the sizes of the other axes."
            )


def _hybrid_grid(devices: Sequence[jax.Device], sizes: Mapping[str, int], dcn: DcnConfig) -> np.ndarray:
    """Return the devices as an array of the shape of the mesh; the slower part of each axis runs across slices."""
    across = tuple(dcn.sizes[axis] for axis in sizes)
    within = tuple(size // factor for size, factor in zip(sizes.values(), across, strict=True))
    if devices[0].platform == "tpu":
        return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    # Axes (slices along axis 0, slices along axis 1, ..., devices along axis 0, ...) -> each pair next to each other.
    # For two axes of 2 x 2 and 1 x 2 (across x within): (2, 1, 2, 2) -> (2, 2, 1, 2) -> (4, 2).
    grid = np.array(devices, object).reshape(*across, *within)
    pairs = [place for axis in range(len(sizes)) for place in (axis, len(sizes) + axis)]
    return grid.transpose(pairs).reshape(tuple(sizes.values()))


def check_model(config: TransformerConfig, sizes: Mapping[str, int]) -> None:
    """Raise a ConfigError if the mesh would split a dimension of the model that is not divisible by its size."""
    has_images = (config.images or config.image_tokens or config.dynamic_images) is not None
    parts = {"model": config} | ({"model.input.encoder": config.image_encoder} if has_images else {})
    for name, part in parts.items():
        # The dimensions that PARAMETER_AXES splits in all layers. Without this check, a parameter with an indivisible
        # one would be replicated (`_spec`). This is accepted only for the vocabulary, which is often odd (GPT-2: 50,257
        # tokens).
        needs = (
            ("num_heads", part.num_heads, "tensor"),
            ("feed_forward.d_ff", part.feed_forward_width, "tensor"),
            ("d_model", part.d_model, "fsdp"),
        )
        for field, size, axis in needs:
            if size % sizes[axis]:
                fit = [n for n in range(1, size + 1) if size % n == 0 and n <= 2 * sizes[axis]]
                raise ConfigError(
                    f"{name}.{field} ({size}) must be a multiple of parallel.{axis} ({sizes[axis]}), which splits it. "
                    f"parallel.{axis} can be {', '.join(map(str, fit))}; or change {name}.{field}."
                )


def num_row_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of parts into which a mesh of these sizes splits the rows of a batch."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def check_batch_sizes(field: str, rows: int, accumulation: int, sizes: Mapping[str, int], length: int | None) -> None:
    """Raise a ConfigError if `rows`, the value of data.`field`, or the sequence length can't be split evenly."""
    ways = num_row_shards(sizes)
    # rows = ways x accumulation x rows per device and micro-batch
    if rows % (ways * accumulation):
        micro = f" x training.accumulation ({accumulation})" if accumulation > 1 else ""
        raise ConfigError(
            f"data.{field} ({rows}) must be a multiple of the {ways} parts that rows are split into "
            f"(data x fsdp x expert){micro}. The nearest are {_nearest_multiples(rows, ways * accumulation)}; or "
            f"use fewer devices: --parallel.devices."
        )
    if length is not None and length % sizes["context"]:
        raise ConfigError(
            f"sequences of {length} tokens must be a multiple of parallel.context ({sizes['context']}), which splits "
            f"them. The nearest lengths are {_nearest_multiples(length, sizes['context'])}."
        )


def _nearest_multiples(size: int, factor: int) -> str:
    below = size // factor * factor
    return " and ".join(str(n) for n in (below, below + factor) if n)  # 0 is no valid size


def parameter_spec(
    path: str, shape: Sequence[int], sizes: Mapping[str, int], rules: AxisRules | None = None
) -> PartitionSpec:
    """Return the spec of the parameter at `path` for these `sizes` of a mesh; `rules` as for `state_shardings`."""
    # Example: query/kernel of stacked layers, (L, D, N, H) -> PartitionSpec(None, "fsdp", "tensor", None).
    return _spec(parameter_axes(path, shape), shape, sizes, rules_in_force(rules, sizes))


def _spec(
    names: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int], rules: AxisRules | None
) -> PartitionSpec:
    # An undeclared parameter has no names, which gives PartitionSpec(): replicated.
    axes = split_axes(names, sizes, PARAMETER_AXES.items() if rules is None else rules)
    axes = [split or () for split in axes]
    # JAX can't place an array whose axis is not divisible by its number of shards (IndivisibleError).
    fits = [size % math.prod(sizes[axis] for axis in split) == 0 for split, size in zip(axes, shape, strict=False)]
    return PartitionSpec(*(_entry(split) if fit else None for split, fit in zip(axes, fits, strict=True)))


def rules_in_force(rules: AxisRules | None, sizes: Mapping[str, int], names: Iterable[str] = ()) -> AxisRules | None:
    """Return `rules`, or else the rules of activations (`partitioning.axis_rules` or `nn.logical_axis_rules`), or None.

    `sizes` are those of the axes of the mesh; `names` are logical axes of boxes, in addition to those of this library.
    A ConfigError for rules that are not pairs, or whose mesh axes are all unknown; a ValueError for an unknown name.
    """
    if rules is None:
        return current_rules()
    wanted: list[str] = []
    for rule in [rules] if isinstance(rules, Mapping | str) else rules:
        # 0 marks a rule that is not a pair; no valid target is a number.
        target = rule[1] if isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str) else 0
        if not (target is None or isinstance(target, str | tuple | list)):
            raise ConfigError(
                f"rules must be pairs of a logical axis and a mesh axis, a tuple of them or None, such as "
                f"[('embed', 'fsdp'), ('heads', None)], got {rule!r}. For a dict, pass tuple(rules.items())."
            )
        wanted += [target] if isinstance(target, str) else target or []
    check_rules(rules, names)
    # Rules for several meshes may name axes that this one lacks, but without any of its axes they replicate everything.
    if wanted and not set(wanted) & set(sizes):
        raise ConfigError(
            f"rules must name at least one axis of the mesh, which has {', '.join(sizes) or 'none'}, got only "
            f"{', '.join(map(repr, dict.fromkeys(wanted)))}. Correct the names, or pass rules=[] to replicate."
        )
    return rules


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes if len(axes) > 1 else axes[0] if axes else None


def check_host_memory(devices: Sequence[jax.Device], option: str) -> None:
    """Raise a ConfigError if the devices can't use pinned host memory, which `option` needs."""
    kinds = {memory.kind for memory in devices[0].addressable_memories()}
    remove = f"Remove {option}; to save device memory without it, use --execution.remat full or --parallel.fsdp."
    if HOST_MEMORY not in kinds:
        raise ConfigError(
            f"{option} needs devices with the memory kind {HOST_MEMORY}, but {devices[0].device_kind} has "
            f"{', '.join(sorted(kinds))}. {remove}"
        )
    if devices[0].platform == "cpu" and jax.__version_info__ < (0, 10):  # XLA can't partition or crashes (jax 0.7.2)
        raise ConfigError(
            f"{option} needs jax 0.10 or newer on a CPU, but this is jax {jax.__version__}. {remove} On a CPU it is "
            f"only for tests, because device memory is host memory."
        )


def offloaded(shardings: PyTree, shapes: PyTree) -> PyTree:
    """Return the shardings with all arrays in host memory; scalars, such as step counts, stay on the devices."""
    return jax.tree.map(
        lambda sharding, leaf: sharding.with_memory_kind(HOST_MEMORY) if leaf.shape else sharding, shardings, shapes
    )


def state_shardings(state: PyTree, mesh: Mesh, rules: AxisRules | None = None) -> PyTree:
    """Return a `NamedSharding` for each leaf of a tree of parameters, optimizer states or both.

    A leaf that is not a parameter of this library (a step count, a PRNG key) is replicated, and so is an axis whose
    size is not divisible by the mesh axis. A leaf in a box of `with_logical_axes` or of Flax has the axes of its box.

    Args:
        state: parameters, a `flax.training.train_state.TrainState`, or any tree that contains the paths of parameters,
            of arrays or `jax.ShapeDtypeStruct`s; `jax.eval_shape` creates one without allocating arrays.
        mesh: any mesh. Axes that occur only in the rules are ignored, but the rules must name one of its axes.
        rules: which mesh axes split the logical axes "embed", "heads", "feed_forward", "vocab", "expert", "norm",
            "layers" and those declared by your own modules (`parameter_axes.declare`), such as `[("embed", "fsdp"),
            ("heads", ("tp", "sp"))]`, in the form of `nn.logical_axis_rules`. None: the current rules
            (`partitioning.axis_rules` or `nn.logical_axis_rules`), or else `PARAMETER_AXES`.

    Raises:
        ConfigError: rules of another form, or without any axis of the mesh.
        ValueError: rules with an unknown logical axis.
    """
    boxes = [leaf for leaf in jax.tree.leaves(state, is_leaf=_is_box) if isinstance(leaf, nn.Partitioned)]
    rules = rules_in_force(rules, mesh.shape, {name for box in boxes for name in box.names if name is not None})

    def sharding(path, leaf):
        if isinstance(leaf, nn.Partitioned):
            return NamedSharding(mesh, _spec(leaf.names, leaf.value.shape, mesh.shape, rules))
        shape = getattr(leaf, "shape", ())
        # Optimizer states contain trees of the shape of the parameters (Adam's mu and nu, say). Declarations match the
        # end of a path, so each of their leaves is sharded like its parameter.
        return NamedSharding(mesh, _spec(parameter_axes(_name(path), shape), shape, mesh.shape, rules))

    return jax.tree_util.tree_map_with_path(sharding, state, is_leaf=_is_box)


def with_logical_axes(tree: PyTree) -> PyTree:
    """Return the tree with each parameter in an `nn.LogicallyPartitioned` box that names its axes, for Flax's tools.

    Pass the result to `nn.get_partition_spec` and then `nn.logical_to_mesh_sharding`. Leaves without declared axes, and
    boxes, are returned unchanged. `nn.meta.unbox` removes the boxes; a model's `apply` accepts parameters with and
    without them.
    """

    def box(path, leaf):
        names = () if _is_box(leaf) else parameter_axes(_name(path), getattr(leaf, "shape", ()))
        return nn.LogicallyPartitioned(leaf, names) if names else leaf

    return jax.tree_util.tree_map_with_path(box, tree, is_leaf=_is_box)


def _is_box(leaf: object) -> bool:
    return isinstance(leaf, nn.Partitioned)


def _name(path: tuple[Any, ...]) -> str:
    if path and getattr(path[-1], "name", None) == "value":  # the array inside an NNX variable
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def batch_sharding(mesh: Mesh, ndim: int, rules: AxisRules | None = None) -> NamedSharding:
    """Return the sharding of a batch array with `ndim` axes.

    The first axis has the logical name "batch", the second, if there is one, "length". By default rows are split over
    data, fsdp and expert, and the length over context; `rules` as for `state_shardings`, with its errors.
    """
    found = rules_in_force(rules, mesh.shape)
    given = (("batch", BATCH_AXES), ("length", "context")) if found is None else found
    rows, *length = split_axes(("batch", "length")[:ndim], mesh.shape, given)
    # A spec may be shorter than the array: later axes, such as the pixels of images, are not split.
    return NamedSharding(mesh, PartitionSpec(rows or None, *(_entry(split or ()) for split in length)))


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Return the rows of a batch that the devices of this process hold, ascending; with one process, all rows."""
    # Device -> (slice of the rows,). Devices that differ only on the axes tensor or context hold the same rows, so the
    # rows are made unique.
    parts = batch_sharding(mesh, 1).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[part] for part in parts]))


def place_batch(
    batch: Mapping[str, np.ndarray], mesh: Mesh, rows: np.ndarray | None = None, batch_size: int | None = None
) -> dict[str, jax.Array]:
    """Place the arrays of a global batch on the mesh, so that each device holds its part.

    With `rows` (`local_rows`), a process passes only these of the `batch_size` rows. A ConfigError for a sequence
    length that the mesh can't split evenly.
    """
    for name, array in batch.items():
        if array.ndim > 1 and array.shape[1] % mesh.shape.get("context", 1):
            raise ConfigError(
                f"{name} is {array.shape[1]} tokens long, which parallel.context ({mesh.shape['context']}) can't split "
                f"evenly. The nearest lengths are {_nearest_multiples(array.shape[1], mesh.shape['context'])}: set "
                f"data.sequence_length, or data.max_source_length and data.max_target_length, to one of them."
            )

    def place(array: np.ndarray) -> jax.Array:
        def part(index):
            if rows is None:
                return array[index]
            # JAX asks for a part by its slices of the global array. Rows are ascending and the part is contiguous, so
            # it is also contiguous among the rows of this process, from the first one that is not below `first`.
            first, last = index[0].indices(batch_size)[:2]
            begin = np.searchsorted(rows, first)
            return array[begin : begin + last - first][:, *index[1:]]

        size = len(array) if rows is None else batch_size
        return jax.make_array_from_callback((size, *array.shape[1:]), batch_sharding(mesh, array.ndim), part)

    return {name: place(array) for name, array in batch.items()}
