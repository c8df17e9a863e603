"""Reference attention: the formula with the full attention matrix. Supports every option; memory is quadratic."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Attended, Float, Key, Query, Value, Weights
from transformer.nn.kernels._contract import AttentionSpec, bias_block


def reference_attention(query: Query, key: Key, value: Value, spec: AttentionSpec) -> tuple[Attended, Weights]:
    """Compute softmax(scale Q K^T + bias + mask) V from the full attention matrix (Vaswani et al. 2017, section 3.2.1).

    The arguments are those of `dot_product_attention`.

    Returns:
        The output (B, T, N, Hv) and the softmax weights (B, N, T, S), before dropout.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, kv_heads = key.shape[1], key.shape[2]
    # Grouped-query attention: G = N / K query heads share a key head (head n uses key head n // G). Treating these
    # heads as more queries of that key head, (B, T, N, H) -> (B, K, G T, H), needs no repeated keys, and both steps
    # become plain batched matrix multiplications, which are fast on CPU (docs/benchmarks.md).
    grouped = query.transpose(0, 2, 1, 3).reshape(batch, kv_heads, -1, head_dim)
    # Q K^T for each batch row and key head: (B, K, G T, H), (B, S, K, H) -> (B, K, G T, S). It accumulates in float32
    # even for bfloat16 inputs: the softmax exponentiates the scores, so their absolute error becomes relative error.
    scores = jnp.einsum("bkqh,bskh->bkqs", grouped, key, preferred_element_type=jnp.float32)
    scores_BNTS = spec.capped(scores.reshape(batch, num_heads, num_queries, num_keys))
    if spec.bias is not None:
        scores_BNTS = scores_BNTS + bias_block(spec.bias, jnp.arange(num_queries), jnp.arange(num_keys))

    allowed = None if spec.mask.is_empty else spec.mask.dense(num_queries, num_keys)
    weights_BNTS = masked_softmax(scores_BNTS, allowed, spec.sinks)
    # Weights are rounded to the dtype of the values, but the sum over keys accumulates in float32:
    # (B, K, G T, S), (B, S, K, Hv) -> (B, K, G T, Hv), then back to (B, T, N, Hv).
    grouped = spec.drop(weights_BNTS, spec.dropout_key).astype(value.dtype).reshape(batch, kv_heads, -1, num_keys)
    out = jnp.einsum("bkqs,bskh->bkqh", grouped, value, preferred_element_type=jnp.float32)
    out = out.reshape(batch, num_heads, num_queries, -1).transpose(0, 2, 1, 3)
    return out.astype(value.dtype), weights_BNTS


def masked_softmax(
    scores_BNTS: Float[Array, "B N T S"], allowed_BNTS: Array | None, sinks: Float[Array, " N"] | None = None
) -> Weights:
    """Compute the softmax over the allowed keys (None: all); the weights of a query without any are all zero.

    A sink is the logit of one more key per head, which has no value (Xiao et al. 2023, arXiv 2309.17453).
    """
    if allowed_BNTS is not None:
        scores_BNTS = jnp.where(allowed_BNTS, scores_BNTS, -jnp.inf)
    # softmax(x) = softmax(x - max x). Without the subtraction, exp overflows float32 for scores above 88.
    top = jnp.max(scores_BNTS, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    # Without a visible key the maximum is -inf, and -inf - (-inf) is NaN; with 0 instead, exp(-inf - 0) = 0. The
    # softmax does not depend on the number that is subtracted, so no gradient has to flow through the maximum.
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    weights = jnp.exp(scores_BNTS - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)  # the sink takes weight from the keys, but adds no value to the output
    # Without a visible key: 0 / 1 = 0. The inner `where` also keeps NaN out of the gradient.
    return weights / jnp.where(total == 0.0, 1.0, total)
