"""Attention of a decoding step on NVIDIA GPUs: one query per row reads the KV cache once, in one kernel.

XLA computes scores, softmax and weighted sum in five kernels, over all slots of the cache. This kernel (Pallas, Triton)
reads only the slots that the mask shows, keeps scores on the chip (Dao et al. 2022, arXiv 2205.14135), and splits a
long cache among several programs, whose parts are then combined (Dao et al. 2023, "Flash-Decoding for long-context
inference").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn import _few_rows as few_rows
from transformer.nn._axes import Array, Attended, DType, Key, Query, Value
from transformer.nn._masks import Mask
from transformer.nn._probing import gpu_compiler_refusal
from transformer.nn.kernels._contract import NO_WEIGHT, AttentionSpec
from transformer.nn.kernels._flash import triton_limits
from transformer.nn.kernels._reference import reference_attention

BLOCK = 128
"""number of keys that a program reads at a time"""

SPLIT_KEYS = 256
"""minimum number of slots of a part of the cache"""

LEAST_PROGRAMS = 264
"""number of programs up to which the cache is split: two for each multiprocessor of an H100"""

REASONS = {
    "weights": "it never stores the full attention matrix",
    "bias": "it reads no bias",
    "dropout": "it is for generation",
    "mask array": "it reads no mask array",
    "segments": "it is for generation from a KV cache",
    "two-sided window": "it is for generation from a KV cache",
    "chunks": "it is for generation from a KV cache",
}
"""options that the kernel does not support, and why"""


def flash_decode_limits(spec: AttentionSpec) -> str | None:
    """Return why the kernel does not support a call; None if it does."""
    if (refusal := triton_limits(spec)) is not None:
        return refusal
    if spec.shapes.num_queries != 1:
        return f"attend from {spec.shapes.num_queries} queries: it supports one per row"
    return None if few_rows.on_one_device() else "run on several devices"


def flash_decode_compiler_refusal(spec: AttentionSpec) -> str | None:
    """Return why the kernel does not compile for this GPU; None if it does."""
    return gpu_compiler_refusal(_example, spec.shapes.dtype)


def _example(dtype: DType) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    def run(query, key, value):
        return flash_decode_attention(query, key, value, AttentionSpec(mask=Mask.lengths(jnp.ones(1, jnp.int32))))[0]

    return run, [jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 1, 2, 64), (1, 128, 1, 64), (1, 128, 1, 64))]


def flash_decode_attention(query: Query, key: Key, value: Value, spec: AttentionSpec) -> tuple[Attended, None]:
    """Compute attention of one query per row.

    The arguments are those of `dot_product_attention`, except for the options that `OPTIONS` excludes.

    Returns:
        The output (B, 1, N, Hv), and None for the weights.
    """
    return _attended(query, key, value, spec), None


@jax.custom_jvp
def _attended(query, key, value, spec):
    rows, _, num_heads, _ = query.shape
    first, last = visible_keys(spec.mask, rows, key.shape[1])
    # (B, S, K, H) -> (B, K, S, H), the order of the cache, whose transpose the caller passes: no copy.
    keys, values = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    splits = _splits(rows * key.shape[2], key.shape[1])
    sinks = spec.sink_logits(num_heads)
    if splits == 1:
        return _run(query[:, 0], keys, values, first, last, sinks, spec, splits)[0][:, None]
    parts, maxima, sums = _run(query[:, 0], keys, values, first, last, sinks, spec, splits)
    # softmax(s) V = sum_i exp(m_i - m) l_i o_i / sum_i exp(m_i - m) l_i over the parts i of the keys, m = max_i m_i,
    # where a part has the maximum m_i, the sum l_i of its exponentials and, already multiplied by l_i, the output o_i.
    most = maxima.max(0)  # (B, N)
    weights = jnp.exp(maxima - most[None])
    out = (weights[..., None] * parts).sum(0)
    return _normalized(out, most, (weights * sums).sum(0), sinks[None])[:, None].astype(value.dtype)


def _normalized(out: Array, top: Array, total: Array, sinks: Array) -> Array:
    """Divide by the sum of the exponentials, to which the sink adds its own; a row without visible keys is 0."""
    most = jnp.maximum(top, sinks)
    shrink = jnp.exp(top - most)
    total = total * shrink + jnp.where(sinks > NO_WEIGHT, jnp.exp(sinks - most), 0.0)
    return out * (shrink / jnp.where(total == 0.0, 1.0, total))[..., None]


@_attended.defjvp
def _attended_jvp(primals, tangents):
    def reference(query, key, value, spec):
        return reference_attention(query, key, value, spec)[0]

    _, slope = jax.jvp(reference, primals, tangents)
    return _attended(*primals), slope


def visible_keys(mask: Mask, rows: int, slots: int) -> tuple[Array, Array]:
    """Return the index of the first key that the query of each row attends to, and that after the last, both (B,)."""
    query = jnp.broadcast_to(jnp.zeros((), jnp.int32) if mask.offset is None else mask.offset, (rows,))
    first, last = jnp.zeros(rows, jnp.int32), jnp.full(rows, slots, jnp.int32)
    if mask.key_lengths is not None:
        last = jnp.minimum(last, mask.key_lengths)
    if mask.is_causal:
        last = jnp.minimum(last, query + 1)
        if mask.window_size is not None:  # the last `window_size` keys up to the query
            first = jnp.maximum(first, query + 1 - mask.window_size)
    return first.astype(jnp.int32), last.astype(jnp.int32)


def _splits(programs: int, slots: int) -> int:
    splits = 1
    while splits * programs < LEAST_PROGRAMS and slots // (2 * splits) >= SPLIT_KEYS:
        splits *= 2
    return splits


def _run(
    query: Array,
    keys: Array,
    values: Array,
    first: Array,
    last: Array,
    sinks: Array,
    spec: AttentionSpec,
    splits: int,
) -> Sequence[Array]:
    """Return the output (B, N, Hv); for I > 1 parts of the keys, in float32, their outputs, maxima and sums (I, B, N).

    query: (B, N, H); keys: (B, K, S, H); values: (B, K, S, Hv); first and last: (B,); sinks: (N,).
    """
    pl, tl = few_rows.pallas(), few_rows.triton()
    (rows, num_heads, head), (kv_heads, slots, value_dim) = query.shape, values.shape[1:]
    group = num_heads // kv_heads
    part = -(-slots // (splits * BLOCK)) * BLOCK
    tall, wide, deep = (few_rows.tile_size(size) for size in (group, head, value_dim))

    def body(query_ref, key_ref, value_ref, first_ref, last_ref, sink_ref, out_ref, *statistics):
        row, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        member = jnp.arange(tall) < group  # of the query heads that share this key head
        heads, features = pl.ds(kv_head * group, tall), jnp.arange(wide) < head
        inside = member[:, None] & features[None, :]
        columns = jnp.arange(deep) < value_dim
        in_head, in_value = few_rows.past_end(row, wide), few_rows.past_end(row, deep)
        queries = tl.load(query_ref.at[row, heads, in_head], mask=inside, other=0.0)
        start = jnp.maximum(first_ref[row], split * part) // BLOCK * BLOCK
        stop = jnp.minimum(last_ref[row], (split + 1) * part)

        def add(step, state):
            top, total, out = state
            at = start + step * BLOCK
            index = at + jnp.arange(BLOCK)
            shown = (index >= first_ref[row]) & (index >= split * part) & (index < stop)
            place = row, kv_head, pl.ds(at, BLOCK)
            tile = tl.load(key_ref.at[*place, in_head], mask=shown[:, None] & features[None, :], other=0.0)
            products = few_rows.dot(queries, tile, (1, 1))
            scores = jnp.where(shown[None, :], spec.capped(products), NO_WEIGHT)
            larger = jnp.maximum(top, scores.max(1))
            # With a larger maximum, earlier exponentials shrink by exp(top - larger): the online softmax (Milakov &
            # Gimelshein 2018, arXiv 1805.02867).
            weights = jnp.where(shown[None, :], jnp.exp(scores - larger[:, None]), 0.0)
            shrink = jnp.exp(top - larger)
            tile = tl.load(value_ref.at[*place, in_value], mask=shown[:, None] & columns[None, :], other=0.0)
            new = few_rows.dot(weights.astype(tile.dtype), tile)
            return larger, total * shrink + weights.sum(1), out * shrink[:, None] + new

        empty = jnp.full(tall, NO_WEIGHT), jnp.zeros(tall), jnp.zeros((tall, deep))
        steps = pl.cdiv(jnp.maximum(stop - start, 0), BLOCK)
        top, total, out = jax.lax.fori_loop(0, steps, add, empty)
        if splits == 1:
            out = _normalized(out, top, total, tl.load(sink_ref.at[heads], mask=member, other=NO_WEIGHT))
        for ref, statistic in zip(statistics, (top, total)[: len(statistics)], strict=True):
            tl.store(ref.at[split, row, heads], statistic, mask=member)
        place = (row, heads, in_value) if splits == 1 else (split, row, heads, in_value)
        tl.store(out_ref.at[place], out.astype(out_ref.dtype), mask=member[:, None] & columns[None, :])

    size = rows, num_heads
    if splits == 1:
        shapes = [jax.ShapeDtypeStruct((*size, value_dim), values.dtype)]
    else:
        sizes = (splits, *size, value_dim), (splits, *size), (splits, *size)
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes]
    return few_rows.launch(body, (rows, kv_heads, splits), shapes, stages=2)(query, keys, values, first, last, sinks)
