"""Attention on NVIDIA GPUs with the fused cuDNN kernel, as called by JAX: scores never leave the chip.

cuDNN supports few kinds of masks: causal masks, causal windows, and lengths. Other masks, such as segments, would need
a mask array whose size is quadratic in the length, so they are rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import Attended, DType, Key, Query, Value
from transformer.nn._partitioning import num_shards, platform, shard_map, unmapped_reason
from transformer.nn._probing import gpu_compiler_refusal
from transformer.nn.kernels._contract import AttentionSpec, attention_example

HEAD_SIZE = 128
"""maximum head dimension that cuDNN's kernel supports on every GPU"""

LIBRARY = "cudnn"
"""`implementation` argument of `jax.nn.dot_product_attention`; tests use "xla", the same formula on any device"""


REASONS = {
    "weights": "it never stores the full attention matrix",
    "bias": "it would store the whole bias array",
    "dropout": "the pattern would not depend on a jax.random.key",
    "mask array": "it would store the whole array. Mask.causal and lengths are supported",
    "segments": "it would need a mask array",
    "two-sided window": "it supports only causal windows",
    "chunks": "it would need a mask array",
    "offset": "its causal mask starts at the first key",
}
"""options that cuDNN does not support, and why; options without a reason are not part of its formula"""


def cudnn_limits(spec: AttentionSpec) -> str | None:
    """Return why cuDNN (FlashAttention-2, Dao 2023, arXiv 2307.08691) does not support a call; None if it does."""
    if LIBRARY == "cudnn" and platform() != "gpu":
        return f"run on {platform()}: cuDNN is a library for NVIDIA GPUs"
    if (refusal := unmapped_reason()) is not None:
        return refusal
    shapes, head = spec.shapes, spec.shapes.head_dim
    refused = {
        "handle a symbolic length": shapes.is_symbolic,
        "use a value head size that differs from the query head size": shapes.value_dim != head,
        f"use a head size of {head}: it supports multiples of 8 up to {HEAD_SIZE}": head % 8 or head > HEAD_SIZE,
        f"compute in {jnp.dtype(shapes.dtype)}: it supports bfloat16 and float16": shapes.dtype
        not in (jnp.bfloat16, jnp.float16),
    }
    return next((why for why, applies in refused.items() if applies), None)


def cudnn_compiler_refusal(spec: AttentionSpec) -> str | None:
    """Return why it does not compile for this GPU and cuDNN (a Tesla T4 has no such kernel); None if it does."""
    return gpu_compiler_refusal(_example, spec.shapes.dtype, uses="this GPU and the installed cuDNN")


def _example(dtype: DType) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    return attention_example(cudnn_attention, (1, 128, 1, 64), dtype)


def cudnn_attention(query: Query, key: Key, value: Value, spec: AttentionSpec) -> tuple[Attended, None]:
    """Compute attention with cuDNN's FlashAttention-2 (Dao 2023, arXiv 2307.08691).

    The arguments are those of `dot_product_attention`, except for the options that `OPTIONS` excludes. Over a mesh each
    device runs the kernel on its own batch rows and heads.

    Returns:
        The output (B, T, N, Hv), and None for the weights.
    """
    mask, batch, num_heads, kv_heads = spec.mask, query.shape[0], query.shape[2], key.shape[2]
    # If the key heads can't be divided among the devices, each query head gets a copy of its key head.
    if kv_heads % num_shards("kv_heads"):
        key, value = (jnp.repeat(array, num_heads // kv_heads, axis=2) for array in (key, value))
    window = None if mask.window_size is None else (mask.window_size - 1, 0)  # (keys before, keys after) the query
    lengths = () if mask.key_lengths is None else (jnp.broadcast_to(mask.key_lengths, (batch,)).astype(jnp.int32),)

    def on_each_device(query, key, value, *lengths):
        # Every query must see a key: the kernel would divide by an empty sum. A row of length 0 therefore attends to
        # one key, and its output is set to 0 below. Queries whose windows start after the last key are declared padding
        # by `query_seq_lengths`. `visible` marks the outputs to keep, (B, 1 or T).
        key_lengths, query_lengths, visible = None, None, None
        if lengths:
            key_lengths, visible = jnp.maximum(lengths[0], 1), (lengths[0] > 0)[:, None]
        if window and (lengths or query.shape[1] > key.shape[1] + window[0]):
            keys = key_lengths if lengths else jnp.full(query.shape[:1], key.shape[1], jnp.int32)
            # Query t sees keys from t - window[0], so the last query that sees one of `keys` keys is keys + window[0] -
            # 1.
            query_lengths = jnp.minimum(keys + window[0], query.shape[1])
            inside = jnp.arange(query.shape[1])[None] < query_lengths[:, None]
            query = jnp.where(inside[:, :, None, None], query, 0)
            visible = inside if visible is None else visible & inside
        out = jax.nn.dot_product_attention(
            query,
            key,
            value,
            scale=spec.scale,
            is_causal=mask.is_causal,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            local_window_size=window,
            implementation=LIBRARY,
        )
        return out if visible is None else jnp.where(visible[:, :, None, None], out, 0)

    rows, heads = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    names = [rows, heads, heads, *[("batch",)] * len(lengths)]
    return shard_map(on_each_device, names, rows)(query, key, value, *lengths).astype(value.dtype), None
