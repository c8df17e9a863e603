"""Attention as the formula is written: all scores at once. Exact, able to do everything, quadratic in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Attended, Float, Key, Query, Value, Weights
from transformer.nn.kernels._contract import AttentionSpec, bias_block


def reference_attention(
    query: Query,
    key: Key,
    value: Value,
    spec: AttentionSpec,
) -> tuple[Attended, Weights]:
    """softmax(scale Q K^T + bias + mask) V (B, T, N, Hv) and the weights (B, N, T, S) (Vaswani et al. 2017, section
    3.2.1); the contract is that of `dot_product_attention`.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, kv_heads = key.shape[1], key.shape[2]
    # The query heads of one key head are further queries of it: both products are then plain ones, a matrix for each
    # row and key head, for which CPUs have fast code (docs/benchmarks.md).
    grouped = query.transpose(0, 2, 1, 3).reshape(batch, kv_heads, -1, head_dim)
    scores = jnp.einsum("bkqh,bskh->bkqs", grouped, key, preferred_element_type=jnp.float32)
    scores_BNTS = spec.capped(scores.reshape(batch, num_heads, num_queries, num_keys))
    if spec.bias is not None:
        scores_BNTS = scores_BNTS + bias_block(spec.bias, jnp.arange(num_queries), jnp.arange(num_keys))

    allowed = None if spec.mask.is_empty else spec.mask.dense(num_queries, num_keys)
    weights_BNTS = masked_softmax(scores_BNTS, allowed, spec.sinks)
    grouped = spec.drop(weights_BNTS, spec.dropout_key).astype(value.dtype).reshape(batch, kv_heads, -1, num_keys)
    out = jnp.einsum("bkqs,bskh->bkqh", grouped, value, preferred_element_type=jnp.float32)
    out = out.reshape(batch, num_heads, num_queries, -1).transpose(0, 2, 1, 3)
    return out.astype(value.dtype), weights_BNTS


def masked_softmax(
    scores_BNTS: Float[Array, "B N T S"],
    allowed_BNTS: Array | None,
    sinks: Float[Array, " N"] | None = None,
) -> Weights:
    """Softmax over the allowed keys (True; broadcasts to (B, N, T, S)), float32. A row with none is all zeros; a sink
    is one more, valueless key (Xiao et al. 2023, arXiv 2309.17453).
    """
    if allowed_BNTS is not None:
        scores_BNTS = jnp.where(allowed_BNTS, scores_BNTS, -jnp.inf)
    top = jnp.max(scores_BNTS, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))  # an empty row: exp(-inf - 0) = 0
    weights = jnp.exp(scores_BNTS - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    return weights / jnp.where(total == 0.0, 1.0, total)
