"""Logical names for the axes of activations, and their placement on the mesh in force: the identity without a mesh.

A module names the axes of an array (`constrain(x, "batch", "length", "embed")`); rules map names to mesh axes. The
mesh is JAX's own ambient one (`jax.set_mesh`). There are three kinds of mesh:

- a mesh with all axes of `nn.sharding.make_mesh`: `ACTIVATION_RULES` places every axis, and what no mesh axis
  splits is replicated;
- a mesh of another project, with axes such as ("dp", "tp"): what no rule maps is left to the compiler
  (`PartitionSpec.UNCONSTRAINED`). `axis_rules`, or Flax's `nn.logical_axis_rules`, map our names to its axes;
- Explicit axes (the default of `jax.make_mesh` since JAX 0.9), where each array's type holds its sharding: nothing is
  constrained, and operations that JAX does not infer a sharding for get one from their operands.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from flax.linen import spmd
from jax.sharding import AxisType, PartitionSpec

from transformer.nn._jax_compat import check_explicit_axes, platform_of
from transformer.nn._parameter_axes import axis_names

AxisRules: TypeAlias = Sequence[tuple[str, str | Sequence[str] | None]]
"""(logical axis, mesh axis, mesh axes or None) pairs in order of priority, in the form of Flax's logical axis rules"""

ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "feed_forward": ("tensor",),
    "vocab": ("tensor",),
    "expert": ("expert",),
    "embed": (),
    "head_dim": (),
}
"""logical axis -> mesh axes it is split over, where the mesh has them; `axis_rules` replaces the table"""

_OWN_AXES = {axis for axes in ACTIVATION_RULES.values() for axis in axes}

_RULES: contextvars.ContextVar[AxisRules | None] = contextvars.ContextVar("axis_rules", default=None)


@contextlib.contextmanager
def axis_rules(rules: AxisRules) -> Iterator[None]:
    """Maps our logical axes to the axes of your mesh, for everything traced inside the `with` block.

    Args:
        rules: pairs such as `[("batch", ("dp", "fsdp")), ("heads", "tp"), ("embed", None)]`, in the form of Flax's
            `nn.logical_axis_rules`, which is read when no `axis_rules` is in force. Of several rules for a name the
            first one counts that has a free axis of the mesh; None replicates the axis; an axis without a rule is left
            to the compiler. Parameters follow the same rules in `sharding.state_shardings`.

    JAX traces a jitted function once for each signature: put the block around the first call.

    Raises:
        ValueError: a name that is not a logical axis of ours, of activations or of declared parameters.
    """
    for name, _ in rules:
        _check(name, (*ACTIVATION_RULES, *sorted(axis_names() - ACTIVATION_RULES.keys())))
    token = _RULES.set(tuple(rules))
    try:
        yield
    finally:
        _RULES.reset(token)


def _check(name: str, names: Iterable[str] = ACTIVATION_RULES) -> None:
    if name not in names:
        raise ValueError(f"unknown logical axis {name!r}: use one of {', '.join(names)}, or None.")


def current_rules() -> AxisRules | None:
    """The rules given by `axis_rules` or by Flax's `nn.logical_axis_rules`; None where our own tables apply."""
    given = _RULES.get()
    return given if given is not None else spmd.get_logical_axis_rules() or None


def split_axes(
    names: Sequence[str | None], sizes: Mapping[str, int], rules: Iterable[tuple[str, str | Sequence[str] | None]]
) -> list[tuple[str, ...] | None]:
    """The mesh axes that split each logical axis of one array; None for a name that no rule maps.

    As in Flax, the first rule for a name counts whose mesh axes no other axis of the array has. Axes that are not in
    `sizes` are left out of a rule, and a rule of such axes alone is skipped; axes of size 1 split nothing.
    """
    split: dict[str, tuple[str, ...]] = {}
    for name, target in rules:
        wanted = (target,) if isinstance(target, str) else tuple(target or ())
        found = tuple(axis for axis in wanted if axis in sizes)
        used = {axis for axes in split.values() for axis in axes}
        if name in names and name not in split and not used & set(found) and (found or not wanted):
            split[name] = found
    return [tuple(axis for axis in split[name] if sizes[axis] > 1) if name in split else None for name in names]


def _placements(names: Sequence[str | None]) -> list[tuple[tuple[str, ...], bool]]:
    """For each axis of one array: the mesh axes that split it, and whether it is replicated over all others. If not,
    the compiler may split it further.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    sizes = {axis: mesh.shape[axis] for axis, kind in types if kind == AxisType.Auto}
    rules = current_rules()
    is_own = rules is None and set(mesh.axis_names) >= _OWN_AXES
    if rules is None:
        rules = [(name, axes) for name, axes in ACTIVATION_RULES.items() if axes]
    return [(axes or (), is_own or axes == ()) for axes in split_axes(names, sizes, rules)]


def mesh_axes(name: str | None) -> tuple[str, ...]:
    """The axes of the mesh in force that a logical axis is split over; none without a mesh, or for None.

    Raises:
        ValueError: an unknown name.
    """
    if name is None:
        return ()
    _check(name)
    return _placements([name])[0][0]


def platform() -> str:
    """What is computed on, "cpu", "gpu" or "tpu": the devices of the mesh in force, which need not be here (a step may
    be compiled for others), or else those of JAX.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else platform_of(device)


def num_shards(name: str) -> int:
    """Into how many parts the mesh in force splits a logical axis; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh_axes(name))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Places `x`, of any shape, by the logical name of each axis (None: whole).

    On a mesh that has all of our axes, what nothing splits, or does not divide, is replicated. On other meshes it is
    left to the compiler.

    Raises:
        ValueError: an unknown name, or not one name an axis.
    """
    if len(names) != x.ndim:
        raise ValueError(f"constrain takes one name an axis: got {len(names)} names for an array of shape {x.shape}.")
    for name in names:
        if name is not None:
            _check(name)
    if not _axes_of(AxisType.Auto):
        return x
    mesh, spec = jax.sharding.get_abstract_mesh(), []
    for size, (axes, is_whole) in zip(x.shape, _placements(names), strict=True):
        divides = size % math.prod(mesh.shape[axis] for axis in axes) == 0
        spec.append(axes if axes and divides else None if is_whole else PartitionSpec.UNCONSTRAINED)
    if all(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def has_mesh() -> bool:
    """Whether a mesh is set (`jax.set_mesh`)."""
    return not jax.sharding.get_abstract_mesh().empty


def _axes_of(*kinds: AxisType) -> set[str]:
    """Axes of the mesh in force that are of these types and split something."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, kind in types if kind in kinds and mesh.shape[axis] > 1}


def unmapped_axes() -> tuple[str, ...]:
    """Axes of the mesh in force that split something and that no rule names. Arrays may be split over them in a way
    that only the compiler knows: a kernel that it can't split would compute the same on each of their devices.
    """
    rules = current_rules()
    if rules is None:
        known = _OWN_AXES
    else:
        targets = [axes for name, axes in rules if name in ACTIVATION_RULES]
        known = {axis for axes in targets for axis in ((axes,) if isinstance(axes, str) else axes or ())}
    unknown = _axes_of(AxisType.Auto, AxisType.Explicit) - known
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in unknown)


def unmapped_reason() -> str | None:
    """For kernels that the compiler can't split: why they don't run under the mesh in force, or None."""
    if not (axes := unmapped_axes()):
        return None
    return (
        f"run under a mesh whose axes {', '.join(axes)} have no rule: each device would compute everything. Map them "
        f'(with transformer.axis_rules([("batch", "{axes[0]}")]): ...)'
    )


def rows_can_merge() -> bool:
    """Whether batch and length may be reshaped to one axis without communication: no mesh axis splits the length, nor
    any axis in a way that the rules do not tell.
    """
    return not unmapped_axes() and not _axes_of(AxisType.Explicit) and num_shards("length") == 1


def explicit_spec(x: jax.Array) -> PartitionSpec | None:
    """The sharding in the type of `x` (any shape), one entry an axis, where the mesh in force has Explicit axes; else
    None.

    Raises:
        ValueError: the type has Explicit axes, but their mesh is not in force: JAX can't differentiate that.
    """
    if _axes_of(AxisType.Explicit):
        return jax.typeof(x).sharding.spec
    mesh = jax.typeof(x).sharding.mesh
    split = [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    if any(mesh.shape[axis] > 1 for axis in split):
        raise ValueError(
            f"an array of shape {x.shape} is sharded over the Explicit mesh axes {', '.join(split)}, but their mesh is "
            f"not in force. Call inside `with jax.set_mesh(mesh):`, or make the mesh with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}."
        )
    return None


def joined_spec(*entries: str | tuple[str, ...] | None) -> PartitionSpec:
    """A spec of these entries in which no mesh axis occurs twice: the first one keeps it."""
    used: set[str] = set()
    kept = []
    for entry in entries:
        axes = {entry} if isinstance(entry, str) else set(entry or ())
        kept.append(None if axes & used else entry)
        used |= axes
    return PartitionSpec(*kept)


def in_auto_axes(function: Callable[..., Any], out_spec: Any) -> Callable[..., Any]:
    """`function`, with Explicit axes of the mesh in force made Auto inside it; itself where there are none.

    For numerics in whose inner steps (scans, gathers, products over split axes) JAX does not infer a sharding. What the
    function reads must be its arguments: an array that it closes over keeps its Explicit type. It is recomputed in the
    backward pass, because a residual of Auto type must not leave it (a scan over layers would stack such residuals).

    Args:
        out_spec: the `PartitionSpec` of each result, as a tree like the result.
    """
    if not (axes := _axes_of(AxisType.Explicit)):
        return function
    check_explicit_axes(sorted(axes))
    return jax.checkpoint(jax.sharding.auto_axes(function, out_sharding=out_spec))


def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a table: (V, D) at (...) -> (..., D); NaN for a row that the table does not have, past the end or
    negative.
    """

    def rows_of(table, rows):
        return table.at[rows].get(mode="fill", wrap_negative_indices=False)

    spec = explicit_spec(rows)
    return in_auto_axes(rows_of, spec and joined_spec(*spec, *explicit_spec(table)[1:]))(table, rows)


def shard_map(
    function: Callable[..., jax.Array], in_names: Sequence[tuple[str | None, ...]], out_names: tuple[str | None, ...]
) -> Callable[..., jax.Array]:
    """`function` of arrays, run by each device on its own part of them (`jax.shard_map`): for kernels that the compiler
    can't split, and for collectives. Without a mesh, or where no name is split by it, the function itself.

    Args:
        function: arrays -> one array, of any shape. It sees parts, and the mesh axes by name.
        in_names: for each argument, the logical name of each axis (None: every device gets it whole).
        out_names: the same for the result. What is not split by a name must be equal on all devices.

    A name splits where every axis it names divides; else it splits none of them.

    Raises:
        ValueError: an unknown name, or not one name an axis.
    """

    def run(*arrays: jax.Array) -> jax.Array:
        axis_sizes = []
        for names, x in zip(in_names, arrays, strict=True):
            if len(names) != x.ndim:
                raise ValueError(f"shard_map takes one name an axis: got {names} for an array of shape {x.shape}.")
            axis_sizes += zip(names, x.shape, strict=True)
        mesh = jax.sharding.get_abstract_mesh()
        axes = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
        if not axes or (unmapped_axes() and not any(mesh_axes(name) for name, _ in axis_sizes)):
            return function(*arrays)
        whole = {name for name, size in axis_sizes if name is None or size % num_shards(name)}

        def spec(names):
            return PartitionSpec(*(None if name in whole else mesh_axes(name) or None for name in names))

        # Kernels with a derivative of their own say nothing of which results are alike: out_names says it.
        split = jax.shard_map(
            function,
            in_specs=tuple(spec(names) for names in in_names),
            out_specs=spec(out_names),
            axis_names=axes,
            check_vma=False,
        )
        return split(*arrays)

    return run
