"""Stochastic rounding of 16-bit parameters and optimizer states, which are updated in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.nn._axes import Array, DType, Float, PRNGKey

STREAM = 2**32 - 1
"""folded into the random key of a step; the keys of replicas are numbered from 0"""


def widened(tree: PyTree) -> PyTree:
    """Return the tree with its 16-bit floating-point leaves in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf, tree)


def rounded_like(old: PyTree, new: PyTree, key: PRNGKey) -> PyTree:
    """Round the leaves of `new` stochastically to the dtypes of the leaves of `old`, where these have 16 bits.

    Rounded to nearest, an update of less than half the distance between two numbers has no effect: a scale of 1.0 in
    bfloat16, whose neighbors are 0.996 and 1.008, never moves with a learning rate of 1e-4. Rounded up with the
    probability of the remainder, updates are right on average (Gupta et al. 2015, arXiv 1502.02551, section 3; for
    training in bfloat16, Zamirai et al. 2020, arXiv 2010.06192). The result is a function of the key, so a resumed run
    rounds as an uninterrupted one.
    """
    leaves, structure = jax.tree.flatten(old)
    values = structure.flatten_up_to(new)
    pairs = enumerate(zip(leaves, values, strict=True))
    return structure.unflatten(
        _rounded(value, leaf.dtype, jax.random.fold_in(key, i)) if _is_narrow(leaf) and not _is_narrow(value) else value
        for i, (leaf, value) in pairs
    )


def _is_narrow(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 2


def _rounded(value: Float[Array, "..."], dtype: DType, key: PRNGKey) -> Float[Array, "..."]:
    """Round float32 values to one of their two neighbors in `dtype`, with their exact values as expectation."""
    nearest = value.astype(dtype)
    rest = value - nearest.astype(jnp.float32)
    away = jnp.where(rest > 0, jnp.inf, -jnp.inf).astype(dtype)
    other = jnp.nextafter(nearest, away)
    # P(other) = rest / (other - nearest), from 0 to 1/2, gives the mean nearest + rest = value.
    share = rest / (other.astype(jnp.float32) - nearest.astype(jnp.float32))  # NaN stays NaN, and is not chosen
    return jnp.where(jax.random.uniform(key, value.shape) < share, other, nearest)
