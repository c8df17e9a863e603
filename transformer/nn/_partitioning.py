"""Logical names for the axes of activations, and their sharding on the current mesh. Without a mesh, nothing changes.

A module names the axes of an array (`constrain(x, "batch", "length", "embed")`), and rules map names to mesh axes. The
mesh is the one set with `jax.set_mesh`. There are three kinds of mesh:

- a mesh with all axes of `nn.sharding.make_mesh`: `ACTIVATION_RULES` determines the sharding of every axis, and axes
  that no mesh axis splits are replicated;
- a mesh of another project, with axes such as ("dp", "tp"): axes without a rule are left to the compiler
  (`PartitionSpec.UNCONSTRAINED`). `axis_rules`, or Flax's `nn.logical_axis_rules`, maps our names to its axes;
- a mesh with Explicit axes (the default of `jax.make_mesh` since JAX 0.9), where the type of each array contains its
  sharding: nothing is constrained, and operations for which JAX can't infer a sharding get one from their operands.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
from flax.linen import spmd
from jax.sharding import AxisType, PartitionSpec

from transformer.nn._axes import PyTree
from transformer.nn._jax_compat import check_explicit_axes, platform_of
from transformer.nn._parameter_axes import axis_names

AxisRules: TypeAlias = Sequence[tuple[str, str | Sequence[str] | None]]
"""pairs of a logical axis and a mesh axis, several mesh axes or None, in order of priority, as in Flax's rules"""

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
"""logical axis -> mesh axes that split it, if the mesh has them; `axis_rules` replaces this table"""

_OWN_AXES = {axis for axes in ACTIVATION_RULES.values() for axis in axes}

# A context variable: each thread has its own rules, so tracing in one thread does not see those of another.
_RULES: contextvars.ContextVar[AxisRules | None] = contextvars.ContextVar("axis_rules", default=None)


@contextlib.contextmanager
def axis_rules(rules: AxisRules) -> Iterator[None]:
    """Map the logical axes of this package to the axes of your mesh, for code traced inside the `with` block.

    JAX traces a jitted function once per signature, so put the block around the first call.

    Args:
        rules: pairs such as `[("batch", ("dp", "fsdp")), ("heads", "tp"), ("embed", None)]`, in the form of Flax's
            `nn.logical_axis_rules`, which apply outside of `axis_rules`. If a name has several rules, the first one
            whose mesh axes are unused applies. None replicates the axis; an axis without a rule is left to the
            compiler. Parameters follow the same rules in `sharding.state_shardings`.

    Raises:
        ValueError: a name that is not a logical axis of activations or of declared parameters.
    """
    check_rules(rules)
    token = _RULES.set(tuple(rules))
    try:
        yield
    finally:
        _RULES.reset(token)


def check_rules(rules: AxisRules, more: Iterable[str] = ()) -> None:
    """Raise ValueError for a rule whose name is no logical axis, declared or in `more`: it would have no effect."""
    names = (*ACTIVATION_RULES, *sorted((axis_names() | set(more)) - ACTIVATION_RULES.keys()))
    for name, _ in rules:
        _check(name, names)


def _check(name: str, names: Iterable[str] = ACTIVATION_RULES) -> None:
    if name not in names:
        raise ValueError(f"unknown logical axis {name!r}: use one of {', '.join(names)}, or None.")


def current_rules() -> AxisRules | None:
    """Return the rules set by `axis_rules` or by Flax's `nn.logical_axis_rules`; None if the default tables apply."""
    given = _RULES.get()
    return given if given is not None else spmd.get_logical_axis_rules() or None


def split_axes(
    names: Sequence[str | None], sizes: Mapping[str, int], rules: Iterable[tuple[str, str | Sequence[str] | None]]
) -> list[tuple[str, ...] | None]:
    """Return the mesh axes that split each logical axis of one array; None for a name without a rule.

    As in Flax, the first rule for a name applies whose mesh axes no other axis of the array uses. Axes that are not in
    `sizes` are removed from a rule, and a rule with only such axes is skipped. Axes of size 1 split nothing.
    """
    split: dict[str, tuple[str, ...]] = {}
    for name, target in rules:
        wanted = (target,) if isinstance(target, str) else tuple(target or ())
        found = tuple(axis for axis in wanted if axis in sizes)
        # A sharding can use each mesh axis for one array axis only (JAX raises DuplicateSpecError): the first name
        # keeps it.
        used = {axis for axes in split.values() for axis in axes}
        if name in names and name not in split and not used & set(found) and (found or not wanted):
            split[name] = found
    return [tuple(axis for axis in split[name] if sizes[axis] > 1) if name in split else None for name in names]


def _placements(names: Sequence[str | None]) -> list[tuple[tuple[str, ...], bool]]:
    """For each axis of one array, return the mesh axes that split it, and whether it is replicated over all others."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    # Inside `shard_map` axes are Manual (arrays are shards already), and Explicit axes belong to the types of arrays:
    # only Auto axes can be constrained.
    sizes = {axis: mesh.shape[axis] for axis, kind in types if kind == AxisType.Auto}
    rules = current_rules()
    is_own = rules is None and set(mesh.axis_names) >= _OWN_AXES
    if rules is None:
        # A name without mesh axes is left out here: on a mesh of our own it is replicated (`is_own`), on any other mesh
        # the compiler decides.
        rules = [(name, axes) for name, axes in ACTIVATION_RULES.items() if axes]
    return [(axes or (), is_own or axes == ()) for axes in split_axes(names, sizes, rules)]


def mesh_axes(name: str | None) -> tuple[str, ...]:
    """Return the axes of the current mesh that split a logical axis; none without a mesh, or for None."""
    if name is None:
        return ()
    _check(name)
    return _placements([name])[0][0]


def platform() -> str:
    """Return the platform of the computation, "cpu", "gpu" or "tpu": that of the current mesh, else JAX's default."""
    # The devices of the mesh may belong to another machine, because a step can be compiled for other devices.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else platform_of(device)


def device_kind() -> str:
    """Return the kind of device of the computation, such as "TPU v5e": that of the current mesh, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def num_shards(name: str) -> int:
    """Return the number of parts into which the current mesh splits a logical axis; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh_axes(name))


def own_part(name: str, size: int) -> Callable[[jax.Array, int], jax.Array]:
    """Return a function that finds elements of a split axis in the part that a device has, for use in `shard_map`.

    The function takes indices of the whole axis, which has this `size`, of any shape, and the size of the part. It
    returns indices of the part; other and negative indices become the size of the part, which is past its end.
    """
    axes = mesh_axes(name)  # inside shard_map, the mesh does not have these axes any more

    def own(indices, part):
        # The axis is split: device d has the indices d part, ..., (d + 1) part - 1.
        if part < size:
            indices = indices - jax.lax.axis_index(axes) * part
        return jax.numpy.where((indices >= 0) & (indices < part), indices, part)

    return own


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain the sharding of `x`, of any shape, by the logical name of each axis (None: not split).

    On a mesh that has all axes of `make_mesh`, an axis that nothing splits, or whose size is not divisible, is
    replicated. On other meshes it is left to the compiler.
    """
    if len(names) != x.ndim:
        raise ValueError(f"constrain takes one name per axis: got {len(names)} names for an array of shape {x.shape}.")
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
    """Return whether a mesh is set (`jax.set_mesh`)."""
    return not jax.sharding.get_abstract_mesh().empty


def _axes_of(*kinds: AxisType) -> set[str]:
    """Return the axes of the current mesh that have one of these types and a size above 1."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, kind in types if kind in kinds and mesh.shape[axis] > 1}


def auto_axes() -> set[str]:
    """Return all Auto axes of the current mesh, also those of size 1; none without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}


def fsdp_axes(features: int) -> tuple[str, ...]:
    """Return the mesh axes that split the `features` (embed) of parameters: fsdp, or by rules those of activations."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh_axes("embed") if current_rules() is not None else ("fsdp",)
    axes = tuple(axis for axis in axes if axis in auto_axes() and mesh.shape[axis] > 1)
    return axes if features % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()


def unmapped_axes() -> tuple[str, ...]:
    """Return the axes of the current mesh that have a size above 1 and no rule."""
    # Only the compiler knows whether they split arrays; a kernel that it can't partition would repeat its work on them.
    rules = current_rules()
    if rules is None:
        known = _OWN_AXES
    else:
        targets = [axes for name, axes in rules if name in ACTIVATION_RULES]
        known = {axis for axes in targets for axis in ((axes,) if isinstance(axes, str) else axes or ())}
    unknown = _axes_of(AxisType.Auto, AxisType.Explicit) - known
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in unknown)


def unmapped_reason() -> str | None:
    """For kernels that the compiler can't partition: return why they don't run under the current mesh, or None."""
    if not (axes := unmapped_axes()):
        return None
    return (
        f"run under a mesh whose axes {', '.join(axes)} have no rule: each device would compute everything. Map them "
        f'(with transformer.axis_rules([("batch", "{axes[0]}")]): ...)'
    )


def num_parts(rows: int, length: int) -> tuple[int, int]:
    """Return the numbers of parts (Bp, Tp) into which the current mesh splits the axes of `rows` and of `length`."""
    sizes = {"batch": rows, "length": length}
    return tuple(num_shards(name) if size % num_shards(name) == 0 else 1 for name, size in sizes.items())


def sum_of_parts(parts: jax.Array, dtype: str | None = None) -> jax.Array:
    """Sum the leading axes (Bp, Tp), split like batch and length, once over devices, in `dtype`, or as `parts`."""
    if dtype is None or jax.numpy.dtype(dtype) == parts.dtype:
        return parts.sum((0, 1))
    # Cast before the sum, so that devices exchange values of this dtype. `lax.reduce`, because `jnp.sum` of bfloat16
    # converts its argument back to float32.
    zero = jax.numpy.zeros((), dtype)
    return jax.lax.reduce(parts.astype(dtype), zero, jax.lax.add, (0, 1))


def rows_can_merge() -> bool:
    """Return whether batch and length can be merged without communication: no axis splits, or may split, the length."""
    return not unmapped_axes() and not _axes_of(AxisType.Explicit) and num_shards("length") == 1


def explicit_spec(x: jax.Array) -> PartitionSpec | None:
    """Return the sharding in the type of `x` (any shape), one entry per axis; None without Explicit axes in the mesh.

    A ValueError if the type has Explicit axes, but their mesh is not the current one: JAX can't differentiate that.
    """
    if _axes_of(AxisType.Explicit):
        return jax.typeof(x).sharding.spec
    mesh = jax.typeof(x).sharding.mesh
    split = [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    if any(mesh.shape[axis] > 1 for axis in split):
        raise ValueError(
            f"an array of shape {x.shape} is sharded over the Explicit mesh axes {', '.join(split)}, but their mesh is "
            f"not set. Call inside `with jax.set_mesh(mesh):`, or create the mesh with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}."
        )
    return None


def joined_spec(*entries: str | tuple[str, ...] | None) -> PartitionSpec:
    """Return a spec with these entries, in which each mesh axis occurs once: the first entry that names it keeps it."""
    used: set[str] = set()
    kept = []
    for entry in entries:
        axes = {entry} if isinstance(entry, str) else set(entry or ())
        # For example ("fsdp", None) of x and ("fsdp",) of W: the result keeps fsdp for its rows.
        kept.append(None if axes & used else entry)
        used |= axes
    return PartitionSpec(*kept)


def in_auto_axes(function: Callable[..., PyTree], out_spec: PyTree) -> Callable[..., PyTree]:
    """Wrap `function` so that Explicit axes of the current mesh are Auto inside it; without such axes, return it as is.

    This is for code with inner steps (scans, gathers, matrix multiplications over split axes) for which JAX does not
    infer a sharding. `out_spec` has the `PartitionSpec` of each result, as a tree. All arrays that the function reads
    must be its arguments: an array in its closure keeps its Explicit type. The function is recomputed in the backward
    pass, because a residual with Auto axes must not leave it (a scan over layers would stack such residuals).
    """
    if not (axes := _axes_of(AxisType.Explicit)):
        return function
    check_explicit_axes(sorted(axes))
    return jax.checkpoint(jax.sharding.auto_axes(function, out_sharding=out_spec))


def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Look up rows of a table: (V, D) at (...) -> (..., D). A row outside the table, or a negative one, gives NaN."""

    def rows_of(table, rows):
        # A negative token id is an error, not an index from the end of the table as in NumPy.
        return table.at[rows].get(mode="fill", wrap_negative_indices=False)

    spec = explicit_spec(rows)
    # (B, T) of the token ids and D of the table
    return in_auto_axes(rows_of, spec and joined_spec(*spec, *explicit_spec(table)[1:]))(table, rows)


_TABLE_GRADIENTS: contextvars.ContextVar[str | None] = contextvars.ContextVar("table_gradients", default=None)


@contextlib.contextmanager
def table_gradients_in(dtype: str) -> Iterator[None]:
    """Sum the gradients of embedding tables over devices in `dtype`, for code traced inside the `with` block."""
    token = _TABLE_GRADIENTS.set(dtype)
    try:
        yield
    finally:
        _TABLE_GRADIENTS.reset(token)


def lookup_tokens(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Look up token embeddings, (V, D) at (B, T) -> (B, T, D), with the gradient of `table_gradients_in`.

    The table is split over V only, and the tokens like a batch.
    """
    dtype = _TABLE_GRADIENTS.get()
    is_narrow = dtype is not None and jax.numpy.dtype(dtype).itemsize < table.dtype.itemsize
    # With one part there is no sum over devices, and nothing to round.
    if not is_narrow or tokens.ndim != 2 or num_parts(*tokens.shape) == (1, 1):
        return lookup(table, tokens)
    return _lookup_with_gradient_in(table, tokens, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lookup_with_gradient_in(table, tokens, dtype):
    return lookup(table, tokens)


def _lookup_forward(table, tokens, dtype):
    # The residuals must be arrays: this empty one has the width and the dtype of the table.
    return lookup(table, tokens), (tokens, table[:, :0])


def _lookup_backward(dtype, residuals, gradients):
    tokens, (vocab_size, table_dtype) = residuals[0], (residuals[1].shape[0], residuals[1].dtype)
    part_of = own_part("vocab", vocab_size)

    def sums(zeros, tokens, gradients):
        # (V, D) of one device: tokens outside of its part of the vocabulary are dropped.
        # dE_v = sum of dy_bt over all positions (b, t) with token v: a scatter-add.
        own = zeros.at[part_of(tokens, zeros.shape[0])].add(gradients.astype(zeros.dtype), mode="drop")
        return own[None, None]

    # Each device adds the rows of its own tokens in float32: a frequent token has thousands of them, and in bfloat16
    # small terms would vanish in a large sum. Only this sum is rounded, once, before the sum over devices.
    zeros = constrain(jax.numpy.zeros((vocab_size, gradients.shape[-1]), jax.numpy.float32), "vocab", "embed")
    names = [("vocab", "embed"), ("batch", "length"), ("batch", "length", "embed")]
    # (Bp, Tp, V, D), one sum for each part of rows and length
    parts = shard_map(sums, names, ("batch", "length", "vocab", "embed"))(zeros, tokens, gradients)
    return sum_of_parts(parts, dtype).astype(table_dtype), None


_lookup_with_gradient_in.defvjp(_lookup_forward, _lookup_backward)


def shard_map(
    function: Callable[..., jax.Array], in_names: Sequence[tuple[str | None, ...]], out_names: tuple[str | None, ...]
) -> Callable[..., jax.Array]:
    """Wrap `function`, arrays -> one array, so that each device runs it on its own shards (`jax.shard_map`).

    This is for kernels that the compiler can't partition, and for collectives. The function can use the names of mesh
    axes. `in_names` and `out_names` are the logical names of the axes (None: every device gets the full axis). A name
    splits either all axes with that name or, if the size of one of them is not divisible, none of them; along axes that
    no name splits, all devices must compute equal results. Without a mesh, or if the mesh splits none of the names, the
    function itself is called.
    """

    def run(*arrays: jax.Array) -> jax.Array:
        axis_sizes = []
        for names, x in zip(in_names, arrays, strict=True):
            if len(names) != x.ndim:
                raise ValueError(f"shard_map takes one name per axis: got {names} for an array of shape {x.shape}.")
            axis_sizes += zip(names, x.shape, strict=True)
        axes = auto_axes()
        # If no axis with a rule splits the arrays, they may still be split over an axis without a rule. `jax.shard_map`
        # would gather them there; called directly, the function leaves the choice to the compiler.
        if not axes or (unmapped_axes() and not any(mesh_axes(name) for name, _ in axis_sizes)):
            return function(*arrays)
        whole = {name for name, size in axis_sizes if name is None or size % num_shards(name)}

        def spec(names):
            return PartitionSpec(*(None if name in whole else mesh_axes(name) or None for name in names))

        # check_vma=False: kernels with a custom derivative don't declare which results are replicated; out_names does.
        specs = {"in_specs": tuple(spec(names) for names in in_names), "out_specs": spec(out_names)}
        return jax.shard_map(function, **specs, axis_names=axes, check_vma=False)(*arrays)

    return run
