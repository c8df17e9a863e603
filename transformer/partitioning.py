"""Logical names for the axes of activations, and their placement on the mesh in force: the identity without a mesh.

A module says what an axis *is* (`constrain(x, "batch", "length", "embed")`); the table here says over which mesh axes
it is split. The mesh is JAX's own ambient one (`jax.set_mesh`), so nothing is stored here.
"""

from __future__ import annotations

import math

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


def _mesh_axes(name: str | None) -> tuple[str, ...]:
    if name is None:
        return ()
    if name not in ACTIVATION_RULES:
        raise ValueError(f"unknown logical axis {name!r}: use one of {', '.join(ACTIVATION_RULES)}, or None.")
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(axis for axis in ACTIVATION_RULES[name] if types.get(axis) == AxisType.Auto and mesh.shape[axis] > 1)


def ways(name: str) -> int:
    """Into how many parts the mesh in force splits a logical axis; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in _mesh_axes(name))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Places `x`, of any shape, by the logical name of each axis (None: anywhere). What doesn't divide stays whole.

    Raises:
        ValueError: an unknown name, or not one name an axis.
    """
    if len(names) != x.ndim:
        raise ValueError(f"constrain takes one name an axis: got {len(names)} names for an array of shape {x.shape}.")
    wanted = [_mesh_axes(name) for name in names]
    placed = [axes if size % math.prod(_sizes(axes)) == 0 else () for size, axes in zip(x.shape, wanted, strict=True)]
    if not any(placed):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(axes or None for axes in placed)))


def _sizes(axes: tuple[str, ...]) -> list[int]:
    mesh = jax.sharding.get_abstract_mesh()
    return [mesh.shape[axis] for axis in axes]
