"""Attention on NVIDIA GPUs by cuDNN's fused kernel, as JAX calls it: scores never leave the chip.

It takes few kinds of masks: causal, a window back, and lengths of rows. What it would need a whole mask array for is
refused, as that array is quadratic; segments are among it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import Attended, Key, Query, Value
from transformer.nn._partitioning import num_shards, platform, shard_map, unmapped_reason
from transformer.nn.kernels._contract import AttentionSpec
from transformer.nn.kernels._probing import attention_example, compiler_error

HEAD_SIZE = 128
"""of a head at most, on every GPU that cuDNN's kernel knows"""

LIBRARY = "cudnn"
"""what `jax.nn.dot_product_attention` is told to use; "xla" is the same arithmetic on any device, for tests"""


REASONS = {
    "weights": "it never holds all weights at once",
    "bias": "it would hold all of it",
    "dropout": "the pattern would not be that of a jax.random.key",
    "mask array": "it would hold all of it. Mask.causal and lengths are fine",
    "segments": "it would need a whole mask array",
    "two-sided window": "its window is a causal one",
    "offset": "its causal mask begins at the first key",
}
"""options that cuDNN does not serve, and why; its formula has no place for those without a reason"""


def cudnn_limits(spec: AttentionSpec) -> str | None:
    """What of the sizes, types and devices of a call cuDNN can't serve, and why; None: it can (Dao 2023, arXiv
    2307.08691).
    """
    if LIBRARY == "cudnn" and platform() != "gpu":
        return f"run on {platform()}: cuDNN is a library for NVIDIA GPUs"
    if (refusal := unmapped_reason()) is not None:
        return refusal
    shapes, head = spec.shapes, spec.shapes.head_dim
    refused = {
        "work on a length left open": not (isinstance(shapes.num_queries, int) and isinstance(shapes.num_keys, int)),
        "take value heads of another size": shapes.value_dim != head,
        f"take heads of {head}: it takes multiples of 8 up to {HEAD_SIZE}": head % 8 or head > HEAD_SIZE,
        f"compute in {jnp.dtype(shapes.dtype)}: it takes bfloat16 and float16": shapes.dtype
        not in (jnp.bfloat16, jnp.float16),
    }
    return next((why for why, applies in refused.items() if applies), None)


def cudnn_compiler_refusal(spec: AttentionSpec) -> str | None:
    """Why this GPU, or its installation of cuDNN, has no such kernel (a Tesla T4 has none); None: it has one."""
    if platform() != "gpu" or (error := compiler_error(_example, spec.shapes.dtype, "gpu")) is None:
        return None
    return f"be compiled for this GPU and the installed cuDNN ({error})"


def _example(dtype: Any) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    return attention_example(cudnn_attention, (1, 128, 1, 64), dtype)


def cudnn_attention(
    query: Query,
    key: Key,
    value: Value,
    spec: AttentionSpec,
) -> tuple[Attended, None]:
    """cuDNN's FlashAttention 2 (Dao 2023, arXiv 2307.08691): the contract of `dot_product_attention` less what
    `OPTIONS` says, the result (B, T, N, Hv). Over a mesh each device runs it on its own rows and heads.
    """
    mask, batch, num_heads, kv_heads = spec.mask, query.shape[0], query.shape[2], key.shape[2]
    if kv_heads % num_shards("kv_heads"):  # a device's query heads may need a part of them: each gets its own
        key, value = (jnp.repeat(array, num_heads // kv_heads, axis=2) for array in (key, value))
    window = None if mask.window_size is None else (mask.window_size - 1, 0)
    lengths = () if mask.key_lengths is None else (jnp.broadcast_to(mask.key_lengths, (batch,)).astype(jnp.int32),)

    def on_each_device(query, key, value, *lengths):
        # No query may be left without a key: no sum of nothing is divided by. A row of length 0 reads one, whose value
        # is then taken away, and queries whose windows begin behind the last key are told to be padding.
        read, reading, sees = None, None, None
        if lengths:
            read, sees = jnp.maximum(lengths[0], 1), (lengths[0] > 0)[:, None]
        if window and (lengths or query.shape[1] > key.shape[1] + window[0]):
            keys = read if lengths else jnp.full(query.shape[:1], key.shape[1], jnp.int32)
            reading = jnp.minimum(keys + window[0], query.shape[1])
            inside = jnp.arange(query.shape[1])[None] < reading[:, None]
            query, sees = jnp.where(inside[:, :, None, None], query, 0), inside if sees is None else sees & inside
        out = jax.nn.dot_product_attention(
            query,
            key,
            value,
            scale=spec.scale,
            is_causal=mask.is_causal,
            query_seq_lengths=reading,
            key_value_seq_lengths=read,
            local_window_size=window,
            implementation=LIBRARY,
        )
        return out if sees is None else jnp.where(sees[:, :, None, None], out, 0)

    rows, heads = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    names = [rows, heads, heads, *[("batch",)] * len(lengths)]
    return shard_map(on_each_device, names, rows)(query, key, value, *lengths).astype(value.dtype), None
