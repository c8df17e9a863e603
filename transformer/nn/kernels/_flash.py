"""Flash attention for NVIDIA GPUs (Dao 2023, arXiv 2307.08691) in Pallas (Triton), for calls that cuDNN refuses.

These are packed segments, softcap, sinks, chunks, windows on both sides, offsets, and values of another size. Scores
stay on the chip in both passes. Each program computes one block of queries (or, for the gradients of keys and values,
one block of keys), and skips blocks that the mask hides completely.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from transformer.nn import _few_rows as few_rows
from transformer.nn._axes import Array, Attended, DType, Key, Leaf, Query, Value, static
from transformer.nn._masks import Mask
from transformer.nn._partitioning import num_shards, platform, shard_map, unmapped_reason
from transformer.nn._probing import gpu_compiler_refusal
from transformer.nn.kernels._contract import NO_WEIGHT, AttentionSpec, attention_example

BLOCK = 64
"""number of queries and of keys that a program multiplies at a time"""

LARGEST_HEAD = 256
"""maximum size of a head: a block of queries, keys, values and sums must fit into the registers of a program"""

RESIDUALS = "flash_residuals"
"""checkpoint name of the output and of the logarithms of the sums, which the backward pass reads"""

REASONS = {
    "weights": "it never stores the full attention matrix",
    "bias": "it reads no bias",
    "dropout": "the pattern would not depend on a jax.random.key",
    "mask array": "it would store the whole array",
}
"""options that the kernel does not support, and why"""


def flash_limits(spec: AttentionSpec) -> str | None:
    """Return why the kernel does not support a call; None if it does."""
    return triton_limits(spec) or unmapped_reason()


def triton_limits(spec: AttentionSpec) -> str | None:
    """Return why no attention kernel in Triton supports the sizes, dtype or device of a call; None if one does."""
    shapes = spec.shapes
    refused = {
        f"run on {platform()}: it is for NVIDIA GPUs": platform() != "gpu" and not few_rows.INTERPRET,
        "handle a symbolic length": shapes.is_symbolic,
        f"use a head size above {LARGEST_HEAD}": max(shapes.head_dim, shapes.value_dim) > LARGEST_HEAD,
        f"compute in {jnp.dtype(shapes.dtype)}: it supports bfloat16 and float16": shapes.dtype
        not in (jnp.bfloat16, jnp.float16),
    }
    return next((why for why, applies in refused.items() if applies), None)


def flash_compiler_refusal(spec: AttentionSpec) -> str | None:
    """Return why the kernel does not compile for this GPU; None if it does."""
    return gpu_compiler_refusal(_example, spec.shapes.dtype)


def _example(dtype: DType) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    return attention_example(flash_attention, (1, 128, 1, 128), dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shown:
    """What a kernel reads of a mask: arrays, and the rules that are known during compilation."""

    offset: Leaf
    """(B,), index of the first query among the keys"""
    lengths: Leaf
    """(B,), number of visible keys"""
    query_segments: Leaf
    """(B, T); (B, 1) if there are no segments"""
    key_segments: Leaf
    """(B, S); (B, 1) if there are no segments"""
    sinks: Leaf
    """(N,), logits of the sinks, `NO_WEIGHT` without sinks"""
    rules: AttentionSpec = dataclasses.field(metadata={"static": True})
    """scale and softcap, and the `Mask` with causality, window and chunks, without arrays"""
    has_segments: bool = static()

    @staticmethod
    def of(spec: AttentionSpec, rows: int, num_keys: int, num_heads: int) -> Shown:
        """Return what the kernel reads for queries of `rows` rows and `num_heads` heads."""
        mask: Mask = spec.mask
        segments = mask.query_segments is not None
        none = jnp.zeros((rows, 1), jnp.int32)

        def whole(array, default):
            return jnp.broadcast_to(jnp.asarray(default if array is None else array, jnp.int32), (rows,))

        def of_tokens(array):
            return jnp.broadcast_to(array, (rows, array.shape[1])).astype(jnp.int32) if segments else none

        return Shown(
            offset=whole(mask.offset, 0),
            lengths=jnp.clip(whole(mask.key_lengths, num_keys), 0, num_keys),
            query_segments=of_tokens(mask.query_segments),
            key_segments=of_tokens(mask.key_segments),
            sinks=spec.sink_logits(num_heads),
            rules=AttentionSpec(
                mask=Mask(is_causal=mask.is_causal, window_size=mask.window_size, chunk_size=mask.chunk_size),
                scale=spec.scale,
                softcap=spec.softcap,
            ),
            has_segments=segments,
        )

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """The arrays that kernels read: offsets, lengths, segments of queries and of keys."""
        return self.offset, self.lengths, self.query_segments, self.key_segments

    def blocks(self, num_queries: int, num_keys: int) -> Array:
        """Return which pairs of blocks (B, blocks of queries, blocks of keys) may contain a visible pair."""

        def spans(segments, size):  # smallest and largest segment of each block, (B, blocks)
            padded = jnp.pad(segments, ((0, 0), (0, -size % BLOCK)), mode="edge")
            return (f(padded.reshape(len(segments), -1, BLOCK), -1) for f in (jnp.min, jnp.max))

        first = jnp.arange(0, num_queries, BLOCK)[None, :, None] + self.offset[:, None, None]
        last = jnp.minimum(first + BLOCK, num_queries + self.offset[:, None, None]) - 1
        start = jnp.arange(0, num_keys, BLOCK)[None, None, :]
        end = jnp.minimum(start + BLOCK, num_keys) - 1
        shown = jnp.broadcast_to(
            start < self.lengths[:, None, None], (len(self.offset), first.shape[1], start.shape[2])
        )
        window, chunk = self.rules.mask.window_size, self.rules.mask.chunk_size
        if self.rules.mask.is_causal:
            shown = shown & (last >= start)
        if window is not None:
            shown = shown & (first - end < window) & (start - last < window)
        if chunk is not None:
            shown = shown & (first // chunk <= end // chunk) & (start // chunk <= last // chunk)
        if self.has_segments:
            (low, high), (least, most) = spans(self.query_segments, num_queries), spans(self.key_segments, num_keys)
            shown = shown & (low[:, :, None] <= most[:, None, :]) & (least[:, None, :] <= high[:, :, None])
        return shown


def flash_attention(query: Query, key: Key, value: Value, spec: AttentionSpec) -> tuple[Attended, None]:
    """Compute attention in blocks whose scores never leave the chip.

    The arguments are those of `dot_product_attention`, except for the options that `OPTIONS` excludes. Over a mesh each
    device runs the kernel on its own batch rows and heads.

    Returns:
        The output (B, T, N, Hv), and None for the weights.
    """
    num_heads, kv_heads = query.shape[2], key.shape[2]
    # If the key heads can't be divided among the devices, each query head gets a copy of its key head.
    if kv_heads % num_shards("kv_heads"):
        key, value = (jnp.repeat(array, num_heads // kv_heads, axis=2) for array in (key, value))
    shown = Shown.of(spec, query.shape[0], key.shape[1], num_heads)
    arrays, tree = jax.tree.flatten(shown)

    def on_each_device(query, key, value, *arrays):
        return _attended(query, key, value, jax.tree.unflatten(tree, arrays))

    rows, heads = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    names = [rows, heads, heads, ("batch",), ("batch",), ("batch", None), ("batch", None), ("heads",)]
    return shard_map(on_each_device, names, rows)(query, key, value, *arrays), None


@jax.custom_vjp
def _attended(query, key, value, shown):
    return _forward(query, key, value, shown)[0]


def _save(query, key, value, shown):
    out, log_sums = (checkpoint_name(array, RESIDUALS) for array in _forward(query, key, value, shown))
    return out, (query, key, value, shown, out, log_sums)


def _gradients(saved, gradient):
    query, key, value, shown, out, log_sums = saved
    # sum_s P_ts dP_ts = sum_h dO_th O_th for each query (Dao et al. 2022, arXiv 2205.14135, appendix B.4), (B, N, T)
    inner = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    arrays = query, key, value, gradient.astype(value.dtype), log_sums, inner
    by_query = _by_query(*arrays, shown)
    by_key, by_value = _by_key_value(*arrays, shown)
    # A sink has no value, so dP = 0 for it: its gradient is -P (sum_s P_ts dP_ts).
    sinks = shown.sinks[None, :, None]
    share = jnp.where(sinks > NO_WEIGHT, jnp.exp(sinks - log_sums), 0.0)
    by_sink = -(share * inner).sum((0, 2))
    integers = jax.tree.map(lambda array: np.zeros(array.shape, jax.dtypes.float0), shown)
    return by_query, by_key, by_value, dataclasses.replace(integers, sinks=by_sink)


_attended.defvjp(_save, _gradients)


def _forward(query: Array, key: Array, value: Array, shown: Shown) -> tuple[Array, Array]:
    """Return the output (B, T, N, Hv), and the logarithm of the sum of the exponentials of each query, (B, N, T)."""
    (rows, num_queries, num_heads, _), (_, num_keys, kv_heads, value_dim) = query.shape, value.shape
    group, tile = num_heads // kv_heads, Tiles(query.shape[3], value_dim, num_queries, num_keys, shown)
    first, last = _range(shown.blocks(num_queries, num_keys))

    def body(q_ref, k_ref, v_ref, sink_ref, first_ref, last_ref, *refs):
        *mask_refs, out_ref, log_ref = refs
        block, head, row = (few_rows.pallas().program_id(axis) for axis in range(3))
        queries = tile.load(q_ref, (row, head), block, "query")
        visible = tile.mask(mask_refs, row, queries_at=block)

        def add(step, state):
            top, total, out = state
            products = few_rows.dot(queries, tile.load(k_ref, (row, head // group), step, "key"), (1, 1))
            seen = visible(step)
            scores = jnp.where(seen, shown.rules.capped(products), NO_WEIGHT)
            larger = jnp.maximum(top, scores.max(1))
            # With a larger maximum, earlier exponentials shrink by exp(top - larger): the online softmax (Milakov &
            # Gimelshein 2018, arXiv 1805.02867).
            weights = jnp.where(seen, jnp.exp(scores - larger[:, None]), 0.0)
            shrink = jnp.exp(top - larger)
            values = tile.load(v_ref, (row, head // group), step, "value")
            new = few_rows.dot(weights.astype(values.dtype), values, (1, 0))
            return larger, total * shrink + weights.sum(1), out * shrink[:, None] + new

        empty = jnp.full(BLOCK, NO_WEIGHT), jnp.zeros(BLOCK), jnp.zeros((BLOCK, tile.value_width))
        top, total, out = jax.lax.fori_loop(first_ref[row, block], last_ref[row, block], add, empty)
        sink = sink_ref[head]
        most = jnp.maximum(top, sink)
        total = total * jnp.exp(top - most) + jnp.where(sink > NO_WEIGHT, jnp.exp(sink - most), 0.0)
        # A query without visible keys has the sum 0: its output is 0, and so are its weights in the backward pass.
        factor = jnp.exp(top - most) / jnp.where(total == 0.0, 1.0, total)
        tile.store(out_ref, (row, head), block, "out", out * factor[:, None])
        tile.store_row(log_ref, (row, head), block, most + jnp.log(jnp.where(total == 0.0, 1.0, total)))

    shapes = [
        jax.ShapeDtypeStruct((rows, num_queries, num_heads, value_dim), value.dtype),
        jax.ShapeDtypeStruct((rows, num_heads, num_queries), jnp.float32),
    ]
    grid = -(-num_queries // BLOCK), num_heads, rows
    return tuple(
        few_rows.launch(body, grid, shapes, stages=3)(query, key, value, shown.sinks, first, last, *shown.arrays)
    )


def _by_query(query, key, value, gradient, log_sums, inner, shown):
    """Return the gradient of the queries, (B, T, N, H)."""
    (rows, num_queries, num_heads, head_dim), (_, num_keys, kv_heads, value_dim) = query.shape, value.shape
    group, tile = num_heads // kv_heads, Tiles(head_dim, value_dim, num_queries, num_keys, shown)
    first, last = _range(shown.blocks(num_queries, num_keys))

    def body(q_ref, k_ref, v_ref, g_ref, log_ref, inner_ref, first_ref, last_ref, *refs):
        *mask_refs, out_ref = refs
        block, head, row = (few_rows.pallas().program_id(axis) for axis in range(3))
        queries, gradients = (tile.load(r, (row, head), block, n) for r, n in ((q_ref, "query"), (g_ref, "out")))
        logs, inners = (tile.load_row(ref, (row, head), block) for ref in (log_ref, inner_ref))
        visible = tile.mask(mask_refs, row, queries_at=block)

        def add(step, total):
            keys = tile.load(k_ref, (row, head // group), step, "key")
            values = tile.load(v_ref, (row, head // group), step, "value")
            slopes = tile.slopes(queries, keys, values, gradients, logs, inners, visible(step))[1]
            return total + few_rows.dot(slopes.astype(keys.dtype), keys, (1, 0))

        zero = jnp.zeros((BLOCK, tile.width))
        total = jax.lax.fori_loop(first_ref[row, block], last_ref[row, block], add, zero)
        tile.store(out_ref, (row, head), block, "query", total * shown.rules.scale)

    shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    grid = -(-num_queries // BLOCK), num_heads, rows
    arrays = query, key, value, gradient, log_sums, inner, first, last, *shown.arrays
    return few_rows.launch(body, grid, shape, stages=2)(*arrays)


def _by_key_value(query, key, value, gradient, log_sums, inner, shown):
    """Return the gradients of the keys, (B, S, K, H), and values, (B, S, K, Hv), summed over the heads of a group."""
    (rows, num_queries, num_heads, head_dim), (_, num_keys, kv_heads, value_dim) = query.shape, value.shape
    group, tile = num_heads // kv_heads, Tiles(head_dim, value_dim, num_queries, num_keys, shown)
    first, last = _range(shown.blocks(num_queries, num_keys).swapaxes(1, 2))

    def body(q_ref, k_ref, v_ref, g_ref, log_ref, inner_ref, first_ref, last_ref, *refs):
        *mask_refs, key_out, value_out = refs
        block, kv_head, row = (few_rows.pallas().program_id(axis) for axis in range(3))
        keys = tile.load(k_ref, (row, kv_head), block, "key")
        values = tile.load(v_ref, (row, kv_head), block, "value")
        visible = tile.mask(mask_refs, row, keys_at=block)
        start, stop = first_ref[row, block], last_ref[row, block]

        def add(step, state):
            by_key, by_value = state
            head, place = kv_head * group + step // (stop - start), start + step % (stop - start)
            queries, gradients = (tile.load(r, (row, head), place, n) for r, n in ((q_ref, "query"), (g_ref, "out")))
            logs, inners = (tile.load_row(ref, (row, head), place) for ref in (log_ref, inner_ref))
            weights, slopes = tile.slopes(queries, keys, values, gradients, logs, inners, visible(place))
            by_value = by_value + few_rows.dot(weights.astype(values.dtype), gradients, (0, 0))
            return by_key + few_rows.dot(slopes.astype(keys.dtype), queries, (0, 0)), by_value

        zeros = jnp.zeros((BLOCK, tile.width)), jnp.zeros((BLOCK, tile.value_width))
        by_key, by_value = jax.lax.fori_loop(0, group * jnp.maximum(stop - start, 0), add, zeros)
        tile.store(key_out, (row, kv_head), block, "key", by_key * shown.rules.scale)
        tile.store(value_out, (row, kv_head), block, "value", by_value)

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (key, value)]
    grid = -(-num_keys // BLOCK), kv_heads, rows
    arrays = query, key, value, gradient, log_sums, inner, first, last, *shown.arrays
    return tuple(few_rows.launch(body, grid, shapes, stages=2)(*arrays))


@dataclass(frozen=True)
class Tiles:
    """Loads, stores and products of blocks of 64 tokens, with zeros past the end of each axis."""

    head_dim: int
    value_dim: int
    num_queries: int
    num_keys: int
    shown: Shown

    @property
    def width(self) -> int:
        """Head size, rounded up to a power of two, at least 16: sizes of the blocks that Triton multiplies."""
        return few_rows.tile_size(self.head_dim)

    @property
    def value_width(self) -> int:
        """Size of a value, rounded up in the same way."""
        return few_rows.tile_size(self.value_dim)

    def _place(self, kind: str, block: Array) -> tuple[Any, Any, Array]:
        """Return the slices of tokens and features of a block, and which entries exist, (64, features)."""
        size = self.head_dim if kind in ("query", "key") else self.value_dim
        width = self.width if kind in ("query", "key") else self.value_width
        tokens = self.num_queries if kind in ("query", "out") else self.num_keys
        inside = (block * BLOCK + jnp.arange(BLOCK)) < tokens
        features = jnp.arange(width) < size
        return (
            few_rows.pallas().ds(block * BLOCK, BLOCK),
            few_rows.past_end(block, width),
            inside[:, None] & features[None, :],
        )

    def load(self, ref: Any, of: tuple[Array, Array], block: Array, kind: str) -> Array:
        """Return a block (64, features) of a row and head; `kind` is query, key, value or out."""
        tokens, features, inside = self._place(kind, block)
        return few_rows.triton().load(ref.at[of[0], tokens, of[1], features], mask=inside, other=0.0)

    def store(self, ref: Any, of: tuple[Array, Array], block: Array, kind: str, values: Array) -> None:
        """Write a block (64, features) of a row and head."""
        tokens, features, inside = self._place(kind, block)
        few_rows.triton().store(ref.at[of[0], tokens, of[1], features], values.astype(ref.dtype), mask=inside)

    def load_row(self, ref: Any, of: tuple[Array, Array], block: Array) -> Array:
        """Return 64 numbers, one per query of a block."""
        inside = (block * BLOCK + jnp.arange(BLOCK)) < self.num_queries
        place = ref.at[*of, few_rows.pallas().ds(block * BLOCK, BLOCK)]
        return few_rows.triton().load(place, mask=inside, other=0.0)

    def store_row(self, ref: Any, of: tuple[Array, Array], block: Array, values: Array) -> None:
        """Write 64 numbers, one per query of a block."""
        inside = (block * BLOCK + jnp.arange(BLOCK)) < self.num_queries
        few_rows.triton().store(ref.at[*of, few_rows.pallas().ds(block * BLOCK, BLOCK)], values, mask=inside)

    def slopes(
        self, queries: Array, keys: Array, values: Array, gradients: Array, logs: Array, inners: Array, seen: Array
    ) -> tuple[Array, Array]:
        """Return weights P, and derivatives of the loss by the unscaled products of queries and keys, both (64, 64)."""
        scores = self.shown.rules.capped(few_rows.dot(queries, keys, (1, 1)))
        weights = jnp.where(seen, jnp.exp(scores - logs[:, None]), 0.0)
        slopes = weights * (few_rows.dot(gradients, values, (1, 1)) - inners[:, None])
        if self.shown.rules.softcap is not None:  # d (c tanh(x / c)) / dx = 1 - tanh^2(x / c)
            slopes = slopes * (1.0 - jnp.square(scores / self.shown.rules.softcap))
        return weights, slopes

    def mask(
        self, refs: Any, row: Array, queries_at: Array | None = None, keys_at: Array | None = None
    ) -> Callable[[Array], Array]:
        """Return a function: block of the other side -> which pairs of queries and keys are visible, (64, 64)."""
        offset_ref, length_ref, query_ref, key_ref = refs
        offset, length = offset_ref[row], length_ref[row]

        def segments(ref, block, size):
            inside = (block * BLOCK + jnp.arange(BLOCK)) < size
            place = ref.at[row, few_rows.pallas().ds(block * BLOCK, BLOCK)]
            return few_rows.triton().load(place, mask=inside, other=-1)

        def visible(block):
            queries, keys = (block, keys_at) if queries_at is None else (queries_at, block)
            rows, columns = (place * BLOCK + jnp.arange(BLOCK) for place in (queries, keys))
            seen = (columns < length)[None, :] & (rows < self.num_queries)[:, None]
            seen = self.shown.rules.mask.by_position((offset + rows)[:, None], columns[None, :], seen)
            if self.shown.has_segments:
                ours, theirs = segments(query_ref, queries, self.num_queries), segments(key_ref, keys, self.num_keys)
                seen = seen & (ours[:, None] == theirs[None, :])
            return seen

        return visible


def _range(blocks: Array) -> tuple[Array, Array]:
    """Return the first visible block of each row of blocks (B, I, J), and that after the last, both (B, I)."""
    count, seen = blocks.shape[2], blocks.any(2)
    first = jnp.where(seen, blocks.argmax(2), 0)
    last = jnp.where(seen, count - blocks[:, :, ::-1].argmax(2), 0)
    return first.astype(jnp.int32), last.astype(jnp.int32)
