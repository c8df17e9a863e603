"""Attention for one slice of queries after the other, each with whole rows of scores, and without the keys that a
causal mask or window hides from all of the slice: for middling lengths on a CPU, where such scores stay in the cache.
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

SLICE = 64
"""queries a slice: on CPU the best from 128 to 1,024 of them (docs/benchmarks.md)"""
MOST = 32
"""slices at most: each is compiled on its own"""


def query_chunked_limits(spec: AttentionSpec) -> str | None:
    """What of the sizes of a call slices can't serve, and why; None: they can."""
    shapes = spec.shapes
    if not isinstance(shapes.num_queries, int) or not isinstance(shapes.num_keys, int):
        return "work on a length left open: how many slices there are is settled when the program is made"
    if shapes.length_shards > 1:
        return "work on a length that a mesh splits: a slice of it is on few devices"
    return None


def query_chunked_attention(
    query: Query,
    key: Key,
    value: Value,
    spec: AttentionSpec,
) -> tuple[Attended, None]:
    """`reference_attention` slice by slice: the contract of `dot_product_attention` less its weights, the result
    (B, T, N, Hv). The backward pass makes each slice of weights again (Chen et al. 2016, arXiv 1604.06174).

    Dropout draws another pattern than the reference from the same key: one key a slice.
    """
    num_queries, num_keys = query.shape[1], key.shape[1]
    slices = min(math.ceil(num_queries / SLICE), MOST)
    size = math.ceil(num_queries / slices)

    @functools.partial(jax.checkpoint, static_argnums=(0, 1, 2))
    def attend(start, first, end, query, key, value, spec):
        queries, keys = jnp.arange(start, start + query.shape[1]), jnp.arange(first, end)
        seen = Mask() if spec.mask.is_empty else Mask.array(spec.mask.block(queries, keys))
        bias = spec.bias
        moved = None if bias is None else lambda q, k: bias(q + start, k + first)
        return reference_attention(query, key, value, dataclasses.replace(spec, mask=seen, bias=moved))[0]

    out = []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        first, end = _keys_seen(spec.mask, start, stop, num_keys)
        drawn_with = None if spec.dropout_key is None else jax.random.fold_in(spec.dropout_key, start)
        own = dataclasses.replace(spec, dropout_key=drawn_with)
        out.append(attend(start, first, end, query[:, start:stop], key[:, first:end], value[:, first:end], own))
    return jnp.concatenate(out, axis=1), None


def _keys_seen(mask: Mask, start: int, stop: int, num_keys: int) -> tuple[int, int]:
    """The keys that queries `start` to `stop` may attend as far as the static facts say; at least one."""
    first, end = 0, num_keys
    if mask.offset is None and mask.query_places is None:
        if mask.is_causal:
            end = min(end, stop)
        if mask.window_size is not None:
            first, end = max(start - mask.window_size + 1, 0), min(end, stop + mask.window_size - 1)
    return (min(first, num_keys - 1), end) if first < end else (num_keys - 1, num_keys)
