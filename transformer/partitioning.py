"""Logical names for the axes of activations, and their placement on the mesh in force: the identity without a mesh.

A module says what an axis *is* (`constrain(x, "batch", "length", "embed")`); the table here says over which mesh axes
it is split. The mesh is JAX's own ambient one (`jax.set_mesh`), so nothing is stored here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AxisType, PartitionSpec

ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "feed_forward": ("tensor",),
    "vocab": ("tensor",),
    "embed": (),
    "head_dim": (),
}
"""logical axis -> mesh axes it is split over, where the mesh has them"""


def mesh_axes(name: str | None) -> tuple[str, ...]:
    """The axes of the mesh in force that a logical axis is split over; none without a mesh, or for None.

    Raises:
        ValueError: an unknown name.
    """
    if name is None:
        return ()
    if name not in ACTIVATION_RULES:
        raise ValueError(f"unknown logical axis {name!r}: use one of {', '.join(ACTIVATION_RULES)}, or None.")
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(axis for axis in ACTIVATION_RULES[name] if types.get(axis) == AxisType.Auto and mesh.shape[axis] > 1)


def platform() -> str:
    """What is computed on, "cpu", "gpu" or "tpu": the devices of the mesh in force, which need not be here (a step may
    be compiled for others), or else those of JAX.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def ways(name: str) -> int:
    """Into how many parts the mesh in force splits a logical axis; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh_axes(name))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Places `x`, of any shape, by the logical name of each axis (None: whole). What doesn't divide is whole, too; an
    array of which nothing is split is then brought together on every device.

    Raises:
        ValueError: an unknown name, or not one name an axis.
    """
    if len(names) != x.ndim:
        raise ValueError(f"constrain takes one name an axis: got {len(names)} names for an array of shape {x.shape}.")
    wanted = [mesh_axes(name) for name in names]
    placed = [axes if size % math.prod(_sizes(axes)) == 0 else () for size, axes in zip(x.shape, wanted, strict=True)]
    if not _splits_anything():
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(axes or None for axes in placed)))


def has_mesh() -> bool:
    """Whether a mesh is set (`jax.set_mesh`)."""
    return not jax.sharding.get_abstract_mesh().empty


def _splits_anything() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind == AxisType.Auto and mesh.shape[axis] > 1 for axis, kind in types)


def _sizes(axes: tuple[str, ...]) -> list[int]:
    mesh = jax.sharding.get_abstract_mesh()
    return [mesh.shape[axis] for axis in axes]


def mapped(
    function: Callable[..., jax.Array], in_names: Sequence[tuple[str | None, ...]], out_names: tuple[str | None, ...]
) -> Callable[..., jax.Array]:
    """`function` of arrays, run by each device on its own part of them (`jax.shard_map`): for kernels that the compiler
    can't split, and for collectives. Without a mesh the function itself, on whole arrays.

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
                raise ValueError(f"mapped takes one name an axis: got {names} for an array of shape {x.shape}.")
            axis_sizes += zip(names, x.shape, strict=True)
        mesh = jax.sharding.get_abstract_mesh()
        axes = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
        if not axes:
            return function(*arrays)
        whole = {name for name, size in axis_sizes if name is None or size % ways(name)}

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
