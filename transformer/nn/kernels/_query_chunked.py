"""Query-chunked attention: reference attention on one chunk of queries at a time.

Each chunk has complete rows of scores, but only for the keys that a causal mask or window leaves visible to the chunk.
It suits medium lengths on CPU, where the scores of a chunk fit in the processor's cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from transformer.nn._axes import Attended, Key, Query, Value
from transformer.nn._masks import Mask
from transformer.nn.kernels._contract import AttentionSpec
from transformer.nn.kernels._reference import reference_attention

CHUNK_SIZE = 64
"""queries per chunk: fastest on CPU for 128 to 1,024 queries (docs/benchmarks.md)"""
MAX_CHUNKS = 32
"""maximum number of chunks, since each chunk is compiled separately"""


def query_chunked_limits(spec: AttentionSpec) -> str | None:
    """Return why the kernel does not support the sizes of a call; None if it supports them."""
    shapes = spec.shapes
    if shapes.is_symbolic:
        return "handle a symbolic length: the number of chunks is fixed during tracing"
    if shapes.length_shards > 1:
        return "handle a length that a mesh splits: a chunk is stored on only a few of the devices"
    return None


def query_chunked_attention(query: Query, key: Key, value: Value, spec: AttentionSpec) -> tuple[Attended, None]:
    """Compute `reference_attention` in chunks of queries; it returns no weights.

    The arguments are those of `dot_product_attention`. The backward pass recomputes the weights of each chunk instead
    of storing them (Chen et al. 2016, arXiv 1604.06174). Dropout uses one key per chunk, so its pattern differs from
    the pattern of the reference kernel for the same key.

    Returns:
        The output (B, T, N, Hv), and None for the weights.
    """
    num_queries, num_keys = query.shape[1], key.shape[1]
    chunks = min(math.ceil(num_queries / CHUNK_SIZE), MAX_CHUNKS)
    size = math.ceil(num_queries / chunks)

    @functools.partial(jax.checkpoint, static_argnums=(0, 1, 2))
    def attend(start, first, end, query, key, value, spec):
        queries, keys = jnp.arange(start, start + query.shape[1]), jnp.arange(first, end)
        # The reference kernel numbers the chunk's queries and keys from 0, so mask and bias are evaluated here at the
        # indices that they have in the whole sequence.
        chunk_mask = Mask() if spec.mask.is_empty else Mask.array(spec.mask.block(queries, keys))
        bias = spec.bias
        chunk_bias = None if bias is None else lambda q, k: bias(q + start, k + first)
        return reference_attention(query, key, value, dataclasses.replace(spec, mask=chunk_mask, bias=chunk_bias))[0]

    out = []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        first, end = _key_range(spec.mask, start, stop, num_keys)
        chunk_key = None if spec.dropout_key is None else jax.random.fold_in(spec.dropout_key, start)
        chunk_spec = dataclasses.replace(spec, dropout_key=chunk_key)
        out.append(attend(start, first, end, query[:, start:stop], key[:, first:end], value[:, first:end], chunk_spec))
    return jnp.concatenate(out, axis=1), None


def _key_range(mask: Mask, start: int, stop: int, num_keys: int) -> tuple[int, int]:
    """Return (first, end), at least one key: `start` to `stop` see no others, by the static part of the mask."""
    first, end = 0, num_keys
    # An offset, explicit positions and groups are arrays, whose values are unknown during tracing.
    if mask.offset is None and mask.query_places is None and mask.query_groups is None:
        if mask.is_causal:
            end = min(end, stop)  # the last query is stop - 1, and it attends to keys up to itself
        if mask.window_size is not None:  # |query - key| < window_size
            first, end = max(start - mask.window_size + 1, 0), min(end, stop + mask.window_size - 1)
        if mask.chunk_size is not None:  # from the chunk of the first query to that of the last one
            size = mask.chunk_size
            first, end = max(first, start // size * size), min(end, ((stop - 1) // size + 1) * size)
    return (first, end) if first < end else (num_keys - 1, num_keys)
