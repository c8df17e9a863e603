"""What every attention kernel is handed and what it may refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer.axes import Array, Attended, DType, Float, Key, PRNGKey, Query, Value, Weights
from transformer.masks import Mask
from transformer.partitioning import explicit_spec, in_auto_axes

BiasFunction: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""(query indices (t,), key indices (s,)) -> what is added to that block of scores, broadcast to (B, N, t, s)"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The facts of one call that decide which kernels can serve it: `num_queries` T, `num_keys` S, `return_weights`."""

    num_queries: int
    num_keys: int
    return_weights: bool
    has_bias: bool = False
    """whether a bias is added to the scores"""
    has_dropout: bool = False
    """whether weights are dropped"""
    has_dense_mask: bool = False
    """whether the mask is, or holds, a boolean array of size T x S"""
    has_offset: bool = False
    """whether the first query stands at another index than the first key, known only when the program runs"""
    has_segments: bool = False
    """whether only keys of the query's own segment are attended"""
    has_two_sided_window: bool = False
    """whether a window shows keys behind the query as well as before it"""
    has_softcap: bool = False
    """whether scores are capped"""
    has_sinks: bool = False
    """whether each head has a logit without a value"""
    dtype: DType = jnp.float32
    """of queries, keys and values"""
    head_size: int = 64
    """of queries and keys"""
    value_size: int = 64
    """of a head's values"""
    length_ways: int = 1
    """into how many parts the mesh in force splits the length"""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to compute attention. `refusal` says what of a request it can't do and why ("add a bias: ..."), or None.

    `run(query, key, value, *, mask, bias, scale, softcap, sinks, dropout_rate, dropout_key)` returns (attended,
    weights), weights None unless it can give them. A kernel with dropout also takes `broadcast_dropout`: one
    pattern (T, S) for all rows and heads.
    """

    run: Callable[..., tuple[jax.Array, Any]]
    refusal: Callable[[Request], str | None]
    split_keys: bool = False
    """whether keys and values may stay split along their length; else each device gets the whole length"""

    def attend(
        self,
        query: Query,
        key: Key,
        value: Value,
        *,
        mask: Mask,
        bias: BiasFunction | None,
        sinks: Float[Array, " N"] | None,
        dropout_key: PRNGKey | None,
        return_weights: bool,
        **numbers: Any,
    ) -> tuple[Attended, Weights | None]:
        """`run`, inside a mesh with Explicit axes too: there the result (B, T, N, Hv) is split as the query is, and a
        bias that reads arrays must be a pytree (`jax.tree_util.Partial`).
        """
        arrays = bias if isinstance(bias, jax.tree_util.Partial) else None

        def attended(query, key, value, mask, arrays, sinks, dropout_key):
            used = bias if arrays is None else arrays
            out, weights = self.run(
                query, key, value, mask=mask, bias=used, sinks=sinks, dropout_key=dropout_key, **numbers
            )
            return (out, weights) if return_weights else (out,)

        spec = explicit_spec(query)
        if spec is not None:
            rows, length, heads, _ = spec
            specs = PartitionSpec(rows, length, heads, None), PartitionSpec(rows, heads, length, None)
            attended = in_auto_axes(attended, specs if return_weights else specs[:1])
        out, *weights = attended(query, key, value, mask, arrays, sinks, dropout_key)
        return out, weights[0] if weights else None


def bias_block(bias: BiasFunction, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """The bias between queries (t,) and keys (s,) with all four axes, (B or 1, N or 1, t or 1, s or 1)."""
    block = bias(queries, keys)
    return block.reshape((1,) * (4 - block.ndim) + block.shape)
