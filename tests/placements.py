"""Meshes of simulated devices, and partition specs by path."""

import jax
from jax.sharding import AxisType


def mesh(**sizes):
    """Return a mesh of the first devices with Auto axes of these sizes."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def specs(shardings):
    """Return the partition specs by path."""
    found = jax.tree_util.tree_leaves_with_path(shardings)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.spec for path, leaf in found}
