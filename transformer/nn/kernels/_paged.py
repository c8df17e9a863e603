"""Attention to a paged KV cache on TPU, with the Pallas kernel of JAX: it reads pages without gathering them first.

The library kernel takes the queries of all rows one after another, without padding, and is causal: the last query of a
row attends to all tokens of the row. Pallas can't interpret it on a CPU (jax 0.10.2). Tests run the library's own
reference there, with the arguments that the kernel gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Attended, DType, Float, Int, Lengths, Query
from transformer.nn._caches import attended_of_stored, of_layer, query_of_stored
from transformer.nn._masks import Mask
from transformer.nn._partitioning import num_shards, own_part, platform, shard_map, unmapped_reason
from transformer.nn._probing import tpu_compiler_refusal
from transformer.nn.kernels._contract import NO_PAGES, AttentionSpec

LANES = 128
"""number of lanes of a TPU vector register; a stored head must be a multiple of it"""

KEY_BYTES = 2 * 2**20
"""size of the two buffers for blocks of keys and values; they share the fast memory (VMEM) with queries and scores"""

BLOCK_KEYS = 512
"""maximum number of keys per block"""

BLOCK_QUERIES = 1024
"""maximum number of queries per block, times the number of heads of a device. With twice as many queries and keys, a
block needs 19.1 of the 16 MiB of VMEM that a kernel may use by default (the compiler's message for llama_1b on v5e)."""

RAGGED_PAGED_REASONS = {
    "weights": "it never stores the full attention matrix",
    "bias": "scores never leave the kernel",
    "dropout": "it does not generate random numbers",
    "mask array": "it is only causal",
    "segments": "it is only causal",
    "two-sided window": "it is only causal",
    "chunks": "it is only causal",
    "sinks": "its softmax contains only keys",
}
"""option -> why the kernel does not support it"""


def ragged_paged_limits(spec: AttentionSpec) -> str | None:
    """Return why the kernel does not support a call; None if it does. The text follows "can't"."""
    if spec.pages is None:
        return NO_PAGES
    if platform() not in ("tpu", "cpu"):
        return f"run on {platform()}: it is a kernel for TPUs"
    if (refused := unmapped_reason()) is not None:
        return refused
    hides_keys = not spec.mask.is_causal or spec.mask.key_lengths is not None
    if hides_keys and not RAGGED_PAGED_REASONS.keys() & set(spec.options):  # an option has a more exact reason
        return "hide keys by their number: it is causal, and attends to all tokens of a row"
    if spec.pages.value_dim == 0:
        return "compute values from keys (MLA): it reads both from the pool"
    return _size_limits(spec, spec.pages)


def _size_limits(spec: AttentionSpec, cache: Any) -> str | None:
    """Return which size or data type of a pool the kernel does not support; None: it supports them."""
    _, _, stored, width = cache.pages.shape[-4:]
    if width % LANES:
        return f"read heads of {width} numbers: a stored head must be a multiple of {LANES} (lanes={LANES})"
    if cache.pages.dtype not in (jnp.float32, jnp.bfloat16) or spec.shapes.dtype != cache.pages.dtype:
        return f"compute {jnp.dtype(spec.shapes.dtype)} from {cache.pages.dtype}: both must be float32, or bfloat16"
    shards = num_shards("kv_heads")
    # Pairs of 16-bit heads share a row of registers, and a tile has 8 of these rows.
    rows = stored // shards * cache.pages.dtype.itemsize // 4
    if stored % (2 * shards) or not (rows in (1, 2, 4) or rows % 8 == 0):
        return f"divide {stored} stored heads of keys and values among {shards} devices: a part does not fill a tile"
    # These two were found with the compiler (jax 0.10.2, libtpu 0.0.51): loads of every second head need 128 lanes, and
    # a block of 8 float32 heads of keys and values may belong to 4 heads of queries, which are half a tile.
    if width > LANES and stored > 2 * shards:
        return f"read {stored // shards // 2} key heads of {width} numbers: more than one must have {LANES}"
    if rows > 8 and cache.pages.dtype == jnp.float32:
        return f"divide {stored // shards} float32 heads of keys and values into blocks: use bfloat16"
    return None


def ragged_paged_compiler_refusal(spec: AttentionSpec) -> str | None:
    """Return why the installed TPU compiler can't compile the kernel; None if it can."""
    return tpu_compiler_refusal(_example, spec.shapes.dtype)


def _example(dtype: DType) -> tuple[Callable[..., Array], list[jax.ShapeDtypeStruct]]:
    """Return a small program with the kernel: one query for each of 8 rows of up to 2 pages of a pool of 4."""

    def attend(query, pool, table, lengths):
        return _attend_rows(query, pool, table, lengths, lengths, 0, spec=AttentionSpec(mask=Mask.causal()))

    floats = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((8, 1, 2, LANES), (1, 4, 16, 4, LANES))]
    return attend, floats + [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 2), (8,))]


def ragged_paged_attention(query: Query, key: None, value: None, spec: AttentionSpec) -> tuple[Attended, None]:
    """Attend to the pages of each row (Kwon et al. 2023, vLLM, arXiv 2309.06180, section 4.1; kernel of JAX).

    The compiler can't partition a Pallas kernel: over a mesh each device runs it on its own rows and heads.

    Args:
        query: (B, T, N, H), of which the first `spec.pages.chunk_lengths` of each row are no padding.
        key: not used.
        value: not used.
        spec: pages, scale, softcap and window.

    Returns:
        (B, T, N, Hv), of which the result of padding is undefined; and None.
    """
    cache = spec.pages
    own_pages = own_part("batch", cache.num_pages)

    def on_each_device(query, pool, table, *arrays):
        # The kernel fetches whole blocks of pages: entries that name no page must be valid, but are not attended to.
        table = own_pages(table, pool.shape[1]) % pool.shape[1]
        return _attend_rows(query, pool, table, *arrays, spec=spec)

    heads, rows = ("batch", None, "kv_heads", None), ("batch",)
    names = [heads, (None, "batch", None, "kv_heads", None), ("batch", None), rows, rows, ()]
    out = shard_map(on_each_device, names, heads)(
        query_of_stored(query, cache.kv_heads, cache.heads_per_stored, cache.pages.shape[-1]),
        cache.stacked_pool,
        of_layer(cache.page_table, cache.layer),
        cache.row_lengths,
        cache.chunk_lengths(query.shape[1]),
        cache.layer_index,
    )
    return attended_of_stored(out, cache.kv_heads, cache.heads_per_stored, cache.value_dim), None


def _attend_rows(
    query: Float[Array, "B T N W"],
    pool: Float[Array, "L P Q C W"],
    table: Int[Array, "B M"],
    lengths: Lengths,
    counts: Lengths,
    layer: Int[Array, ""] | int,
    *,
    spec: AttentionSpec,
) -> Float[Array, "B T N W"]:
    # Each row has `lengths` (B,) tokens, and the last `counts` (B,) of them are the queries. The table has only valid
    # pages, also for rows with fewer tokens.
    (batch, num_tokens), num_pages = query.shape[:2], pool.shape[1]
    queries, starts = _without_padding(query, counts)
    out = _kernel(queries.shape[0], query.shape[2], pool, table.shape[1])(
        queries,
        # The pools of all layers are one pool for the kernel, so that the layer's is not copied out of the stack.
        pool.reshape(-1, *pool.shape[2:]),
        jnp.maximum(lengths, 1),  # it fetches the first block of a row in advance: each row must have a key
        table + layer * num_pages,
        starts,
        jnp.array([batch], jnp.int32),
        sm_scale=spec.scale,
        sliding_window=spec.mask.window_size,
        soft_cap=spec.softcap,
    )
    # Back to (B, T): query t of row b is at starts[b] + t.
    places = starts[:-1, None] + jnp.arange(num_tokens)[None, :]
    return out[jnp.minimum(places, out.shape[0] - 1)]


def _without_padding(query: Float[Array, "B T N W"], counts: Lengths) -> tuple[Float[Array, "n N W"], Int[Array, " b"]]:
    """Return the queries of all rows one after another, (B T, N, W), and where each row starts, (B + 1,)."""
    batch, num_tokens = query.shape[:2]
    # A row without queries keeps one, whose result is not used: the kernel does not skip empty rows.
    counts = jnp.maximum(counts, 1)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    if num_tokens == 1:
        return query[:, 0], starts
    tokens = jnp.arange(num_tokens)[None, :]
    # Padding gets the index B T, past the end: "drop" ignores it.
    places = jnp.where(tokens < counts[:, None], starts[:-1, None] + tokens, batch * num_tokens)
    packed = jnp.zeros((batch * num_tokens, *query.shape[2:]), query.dtype)
    return packed.at[places].set(query, mode="drop"), starts


def _kernel(num_queries: int, num_heads: int, pool: Array, pages_per_row: int) -> Callable[..., Array]:
    """Return the library's kernel with block sizes that fit into VMEM; on CPU its reference, for calls outside jit."""
    # Imported here because the import of Pallas is slow, and most programs do not need it.
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as library

    if platform() == "cpu":
        return library.ref_ragged_paged_attention
    _, _, page_size, stored, width = pool.shape
    # Two buffers: the kernel copies the next block into one while it reads the other.
    keys = min(BLOCK_KEYS, KEY_BYTES // (2 * stored * width * pool.dtype.itemsize))
    return functools.partial(
        library.ragged_paged_attention,
        num_kv_pages_per_block=max(1, min(pages_per_row, keys // page_size)),
        num_queries_per_block=queries_per_block(num_queries, num_heads, width),
    )


def queries_per_block(num_queries: int, num_heads: int, width: int) -> int:
    """Return how many of the queries of all rows, each of N heads of W numbers, the kernel attends from at a time."""
    # n queries of N heads of W numbers take as much room as n N W / 128 heads of 128.
    return max(1, min(num_queries, BLOCK_QUERIES * LANES // (num_heads * width)))
