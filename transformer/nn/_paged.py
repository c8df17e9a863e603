"""A paged KV cache: keys and values are stored in pages of a pool, and each row has a table of its pages.

Rows of very different lengths then share one pool without gaps, rows with the same beginning may share its pages, and
the pages of a row that has ended serve another row (Kwon et al. 2023, vLLM, arXiv 2309.06180, section 4).

Axis letters in addition to those of `_axes.py`: P pages of the pool, Q tokens per page, M pages per row, S = M Q; C
stored heads (keys and values), W numbers per stored head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import Array, Bool, DType, Float, Int, Key, Leaf, Lengths, Positions, PyTree, Value, static
from transformer.nn._caches import KVCache, SelfAttentionCache, known_rows, of_layer
from transformer.nn._masks import Mask, real_tokens
from transformer.nn._partitioning import num_shards, own_part, platform, shard_map

NO_PAGE = -1
"""entry of a page table that names no page"""

LANES = {"tpu": 128}
"""numbers per stored head are a multiple of this, by platform; elsewhere 1. A TPU pads the last axis to 128 numbers."""

_POOL = (None, "batch", None, "kv_heads", None)
"""logical axes of the pools (L, P, Q, C, W) of all layers: pages are split like the rows that use them"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKVCache(SelfAttentionCache):
    """Keys and values of self-attention in a pool of pages. It takes the place of a `KVCache` in every layer.

    Token i of row b is stored in page `page_table[b, i // Q]` at offset i % Q, and its position is i. Entries of the
    table after the last token of a row are not read, and may be `NO_PAGE`. Several rows may name the same page: they
    share its tokens, and no row may write to it. All layers have the same table; each layer has its own pool.

    On a mesh that splits the rows into parts, the pool is split into as many parts, if P is divisible. A row may then
    use only pages of its own part.

    Keys and values of the same head are neighbors on the axis C, as `ragged_paged_attention` of JAX requires. A TPU
    stores at least 128 numbers per head. Several smaller heads are therefore stored as one head of 128 numbers, if the
    number of heads permits it, and other sizes are padded with zeros.
    """

    pages: Leaf
    """(P, Q, C, W), the pool"""
    page_table: Leaf
    """(B, M), int32, pages of each row in the order of its tokens"""
    length: Leaf
    """(B,), number of tokens in each row"""
    chunk_length: Leaf | None = None
    """(B,), how many of the T tokens of the next call belong to each row, the rest being padding; None: all T"""
    text_length: Leaf | None = None
    """(B,), length of the text of each row, if the next call reads only a part of it and rotary scaling depends on the
    length; None: it ends with the tokens of the next call"""
    layer: Leaf | None = None
    """(), index of the layer that is read and written, if all arrays have a leading axis of layers; otherwise None"""
    kv_heads: int = static(0)
    """number K of key/value heads"""
    head_dim: int = static(0)
    """size H of a key head"""
    value_dim: int = static(0)
    """size Hv of a value head; 0: the values are computed from the keys (MLA), and the pool stores only keys"""

    @staticmethod
    def create(
        num_pages: int,
        page_size: int,
        rows: int,
        pages_per_row: int,
        heads: tuple[int, int, int],
        dtype: DType,
        lanes: int | None = None,
    ) -> PagedKVCache:
        """Return an empty cache without pages in its table.

        Args:
            num_pages: P.
            page_size: Q.
            rows: B.
            pages_per_row: M.
            heads: number of key/value heads K, size of a key head H and of a value head Hv.
            dtype: data type of keys and values.
            lanes: multiple of which W must be; None: that of the current platform.
        """
        kv_heads, head_dim, value_dim = heads
        lanes = LANES.get(platform(), 1) if lanes is None else lanes
        size = max(head_dim, value_dim)
        together = heads_together(kv_heads, size, lanes)
        # Several heads fill the lanes exactly. A single one is padded: with 128 lanes, H = 80 gives W = 128.
        width = math.ceil(together * size / lanes) * lanes
        # C: K / together stored keys, and as many values unless they are computed from the keys
        stored = kv_heads // together * (1 if value_dim == 0 else 2)
        return PagedKVCache(
            pages=jnp.zeros((num_pages, page_size, stored, width), dtype),
            page_table=jnp.full((rows, pages_per_row), NO_PAGE, jnp.int32),
            length=jnp.zeros((rows,), jnp.int32),
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
        )

    @property
    def page_size(self) -> int:
        """Number of tokens per page, Q."""
        return self.pages.shape[-3]

    @property
    def num_pages(self) -> int:
        """Number of pages of the pool, P."""
        return self.pages.shape[-4]

    @property
    def heads_per_stored(self) -> int:
        """Number of key heads that are stored as one head."""
        stored = self.pages.shape[-2] // (1 if self.value_dim == 0 else 2)
        return self.kv_heads // stored if stored else 1

    @property
    def key_positions(self) -> Positions:
        """Position of each key, (B, S): its index."""
        rows, pages = self.page_table.shape[-2:]
        return jnp.broadcast_to(jnp.arange(pages * self.page_size, dtype=jnp.int32), (rows, pages * self.page_size))

    def chunk_lengths(self, num_tokens: int) -> Lengths:
        """Return how many of the T tokens of a call belong to each row, (B,)."""
        if self.chunk_length is None:
            return jnp.full(self.page_table.shape[-2:-1], num_tokens, jnp.int32)
        return jnp.clip(of_layer(self.chunk_length, self.layer), 0, num_tokens)

    def fits(self, num_tokens: int) -> Bool[Array, "B T"]:
        """Return which of the next T tokens of each row of this layer have a page, or are padding."""
        _, pages = self._next_places(num_tokens)
        padding = jnp.arange(num_tokens)[None, :] >= self.chunk_lengths(num_tokens)[:, None]
        return padding | (pages != NO_PAGE)

    def check_room(self, num_tokens: int) -> None:
        """Check that the next T tokens of each row have pages, as far as tables and lengths are known.

        Raises:
            ValueError: a row without a page for a token.
        """
        arrays = (self.length, self.page_table)
        arrays = arrays if self.chunk_length is None else (*arrays, self.chunk_length)
        if (known := known_rows(*arrays)) is None:
            return
        length, table, *counts = known
        counts = np.clip(counts[0], 0, num_tokens) if counts else np.full(length.shape, num_tokens)
        # The new tokens of row b have the indices length[b], ..., end[b] - 1 and need the pages first[b], ..., (end[b]
        # - 1) // Q.
        first, end = (length // self.page_size)[:, None], length + counts
        number = np.arange(-(-int(end.max(initial=0)) // self.page_size))[None, :]  # of each page of a row, (1, n)
        # (B, n). Columns beyond the width M of the table name no page.
        needed = (number >= first) & (number * self.page_size < end[:, None])
        named = np.zeros(needed.shape, bool)
        named[:, : table.shape[1]] = table[:, : number.shape[1]] != NO_PAGE
        if (missing := (needed & ~named).any(1)).any():
            row = int(missing.argmax())
            raise ValueError(
                f"the paged KV cache is full: expected a page for each of {counts[row]} more tokens, but row {row} has "
                f"{length[row]} tokens, and its table names {int((table[row] != NO_PAGE).sum())} pages of "
                f"{self.page_size} tokens. Add pages to its table (set_rows), of which it can have {table.shape[1]}, "
                f"or create the cache with more pages_per_row."
            )

    def append(self, key: Key, value: Value, positions: Positions) -> PagedKVCache:
        """Return the cache with T more keys and values in each row, without those of padding (`chunk_length`).

        Inside jit, tables and lengths are not known: tokens for which the table has no page are dropped there, and
        counted. Attention makes its result NaN with `_caches.nan_without_room`.

        Args:
            key: (B, T, K, H).
            value: (B, T, K, Hv).
            positions: (B, T); not used, because the position of a token is its index in the row.

        Raises:
            ValueError: outside jit, a token for which the table has no page.
        """
        del positions
        num_tokens = key.shape[1]
        # (B,), or row `layer` of (L, B)
        length = self.length.at[*self.place, :].add(self.chunk_lengths(num_tokens))
        if self.kv_heads == 0:  # a layer without self-attention only counts tokens
            return dataclasses.replace(self, length=length)
        self.check_room(num_tokens)
        slots, pages = self._next_places(num_tokens)
        stored = self._pack(key, value).astype(self.pages.dtype)

        own_pages = own_part("batch", self.num_pages)

        def write(pool, pages, offsets, new, layer):
            # Pages of other devices and NO_PAGE become the index p, the size of this device's part: "drop" ignores
            # them.
            pages = own_pages(pages, pool.shape[1])
            # The pool of a layer would be copied out of the stack, and back, if it were not updated in place.
            # pool (L, p, Q, C, W), pages and offsets (b, T), new (b, T, C, W)
            return pool.at[layer, pages, offsets].set(new, mode="drop")

        names = [_POOL, ("batch", None), ("batch", None), ("batch", None, "kv_heads", None), ()]
        arrays = self.stacked_pool, pages, slots % self.page_size, stored, self.layer_index
        pool = shard_map(write, names, _POOL)(*arrays)
        return dataclasses.replace(self, pages=pool.reshape(self.pages.shape), length=length)

    def _next_places(self, num_tokens: int) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """Return the index of each of the next T tokens in its row, and its page; `NO_PAGE` for padding."""
        counts, table = self.chunk_lengths(num_tokens), of_layer(self.page_table, self.layer)
        chunk = jnp.arange(num_tokens)[None, :]
        slots = self.row_lengths[:, None] + chunk
        places = slots // self.page_size
        # Clip the index: the last line replaces pages beyond the table by NO_PAGE.
        pages = jnp.take_along_axis(table, jnp.minimum(places, table.shape[1] - 1), axis=1)
        return slots, jnp.where((chunk < counts[:, None]) & (places < table.shape[1]), pages, NO_PAGE)

    def whole(self) -> tuple[Key, Value]:
        """Return keys (B, S, K, H) and values (B, S, K, Hv) of all pages of each row, gathered; 0 after its length."""
        return self.part(jnp.int32(0), self.page_table.shape[-1])

    def part(self, first: Int[Array, ""], count: int) -> tuple[Key, Value]:
        """Return keys (B, s, K, H) and values (B, s, K, Hv) of `count` pages of each row, gathered; 0 after its length.

        A page that another row used before still contains the tokens of that row. The mask hides them, but a weight of
        0 does not hide NaN or infinity, so they are replaced by zeros.

        Args:
            first: (), index in the table of the first page; pages after the last one are read as zeros.
            count: number of pages, s / Q.
        """
        own_pages = own_part("batch", self.num_pages)
        table = of_layer(self.page_table, self.layer)
        places = first + jnp.arange(count)
        table = jnp.take(table, jnp.minimum(places, table.shape[1] - 1), axis=1)
        # Tokens of each row from the first page on; a page after the last one has index M or more, so it is not filled.
        lengths = jnp.minimum(self.row_lengths, self.page_table.shape[-1] * self.page_size) - first * self.page_size

        def read(pool, table, lengths, layer):
            found = pool[layer, own_pages(table, pool.shape[1])]
            found = found.reshape(found.shape[0], -1, *found.shape[3:])  # (B, m, Q, C, W) -> (B, s, C, W)
            filled = jnp.arange(found.shape[1])[None, :] < lengths[:, None]
            return jnp.where(filled[:, :, None, None], found, 0)

        names = [_POOL, ("batch", None), ("batch",), ()]
        arrays = self.stacked_pool, table, lengths, self.layer_index
        return self._unpack(shard_map(read, names, ("batch", None, "kv_heads", None))(*arrays))

    @property
    def stacked_pool(self) -> Float[Array, "L P Q C W"]:
        """Pools of all layers, of which this layer's has the index `layer_index`."""
        return self.pages[None] if self.layer is None else self.pages

    @property
    def layer_index(self) -> Int[Array, ""]:
        """Index of this layer in `stacked_pool`."""
        return jnp.int32(0) if self.layer is None else self.layer

    def _pack(self, key: Key, value: Value) -> Float[Array, "B T C W"]:
        """Return keys (B, T, K, H) and values (B, T, K, Hv) in the order in which the pool stores them."""
        together, width = self.heads_per_stored, self.pages.shape[-1]
        size = width // together

        def stored(heads):
            # (B, T, K, H) -> (B, T, K', W): neighboring heads share a stored head. Zeros at the end change no product q
            # . k.
            heads = jnp.pad(heads, [(0, 0)] * 3 + [(0, size - heads.shape[-1])])
            return heads.reshape(*heads.shape[:2], -1, width)

        if self.value_dim == 0:
            return stored(key)
        both = jnp.stack([stored(key), stored(value)], axis=3)  # (B, T, K', 2, W)
        return both.reshape(*both.shape[:2], -1, width)

    def _unpack(self, stored: Float[Array, "B S C W"]) -> tuple[Key, Value]:
        """Return keys (B, S, K, H) and values (B, S, K, Hv): the inverse of `_pack`."""
        batch, length, _, width = stored.shape
        size = width // self.heads_per_stored
        if self.value_dim == 0:
            key = stored.reshape(batch, length, self.kv_heads, size)[..., : self.head_dim]
            return key, key[..., :0]
        both = stored.reshape(batch, length, -1, 2, width)
        key, value = (both[:, :, :, part].reshape(batch, length, self.kv_heads, size) for part in (0, 1))
        return key[..., : self.head_dim], value[..., : self.value_dim]


def text_lengths(positions: Positions, mask: Mask, cache: SelfAttentionCache | None) -> Lengths:
    """Return the length (B,) of the text in each row: its largest position plus 1, without padding (`mask`).

    The cache before the tokens (B, T) can know the length of a text that is read in parts; None: no cache.
    """
    start = None if cache is None else cache.row_lengths
    real = real_tokens(mask, positions.shape, start)
    if isinstance(cache, PagedKVCache):
        if cache.text_length is not None:
            return of_layer(cache.text_length, cache.layer)
        real = real & (jnp.arange(positions.shape[1])[None, :] < cache.chunk_lengths(positions.shape[1])[:, None])
    return jnp.where(real, positions, 0).max(1) + 1


def paged_cache(
    model: Any, *, rows: int, pages_per_row: int, num_pages: int, page_size: int, lanes: int | None = None
) -> PyTree:
    """Return an empty paged cache for a `CausalLM`, to pass as `model.apply(variables, tokens, cache=cache)`.

    It has the structure of `model.init_cache`, with a `PagedKVCache` in the place of each `KVCache`.

    Args:
        model: a `CausalLM`; its parameters are not needed.
        rows: B, number of rows of a batch.
        pages_per_row: M, maximum number of pages of a row.
        num_pages: P, number of pages of the pool of each layer.
        page_size: Q, number of tokens per page.
        lanes: as in `PagedKVCache.create`.

    Raises:
        ValueError: a size below 1.
    """
    sizes = {"rows": rows, "pages_per_row": pages_per_row, "num_pages": num_pages, "page_size": page_size}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} of a paged cache must be at least 1, got {size}. Pass a larger number.")

    if model.config.has_linear_attention:
        raise ValueError(
            "a paged cache stores keys and values, but linear attention has a state instead. Use model.init_cache."
        )

    def paged(node):
        if not isinstance(node, KVCache):
            return node
        *layers, _, stored, _, width = node.key.shape  # (layers, B, K', S, W)
        together = node.heads_per_stored
        heads = stored * together, width // together, node.value.shape[-1] // together
        one = PagedKVCache.create(num_pages, page_size, rows, pages_per_row, heads, node.key.dtype, lanes)
        return jax.tree.map(lambda array: jnp.broadcast_to(array, (*layers, *array.shape)), one)

    # Only the structure is needed: eval_shape allocates nothing.
    shapes = jax.eval_shape(lambda: model.init_cache(1, 1))
    return jax.tree.map(paged, shapes, is_leaf=lambda node: isinstance(node, KVCache))


def set_rows(
    cache: PyTree,
    *,
    page_table: Int[Array, "B M"] | None = None,
    length: Lengths | None = None,
    chunk_length: Lengths | None = None,
) -> PyTree:
    """Return a paged cache, a tree, with other tables, lengths or chunk lengths in all layers; None: unchanged.

    A row is emptied by setting its length to 0, and gets other pages by setting its table. Pages keep their contents.
    """

    def with_rows(node):
        given = {"page_table": page_table, "length": length, "chunk_length": chunk_length}
        layers = node.length.shape[:-1]
        changed = {
            name: jnp.broadcast_to(array, (*layers, *jnp.shape(array))).astype(jnp.int32)
            for name, array in given.items()
            if array is not None
        }
        return dataclasses.replace(node, **changed)

    return _map_paged(with_rows, cache)


def copy_pages(cache: PyTree, sources: Int[Array, " n"], targets: Int[Array, " n"]) -> PyTree:
    """Return a paged cache, a tree, in which page `targets[i]` of every pool has the contents of page `sources[i]`.

    A row that shares a partly filled page with another row must write to its own copy of it (copy-on-write). Pairs
    whose target is `NO_PAGE` are ignored, so that the number of pairs may be padded. On a mesh that splits the pool,
    both pages of a pair must be in the same part.
    """

    def copied(node):
        own_pages = own_part("batch", node.num_pages)

        def copy(pool, sources, targets):
            sources, targets = (own_pages(pages, pool.shape[1]) for pages in (sources, targets))
            # A source on another device has the index p and becomes page 0. Its target is on that device too, so this
            # copy is dropped here.
            return pool.at[:, targets].set(pool[:, sources % pool.shape[1]], mode="drop")

        pool = node.pages.reshape(-1, *node.pages.shape[-4:])
        pool = shard_map(copy, [_POOL, (None,), (None,)], _POOL)(pool, sources, targets)
        return dataclasses.replace(node, pages=pool.reshape(node.pages.shape))

    return _map_paged(copied, cache)


def _map_paged(function: Callable[[PagedKVCache], PagedKVCache], cache: PyTree) -> PyTree:
    def is_paged(node):
        return isinstance(node, PagedKVCache)

    return jax.tree.map(lambda node: function(node) if is_paged(node) else node, cache, is_leaf=is_paged)


def heads_together(kv_heads: int, size: int, lanes: int | None = None) -> int:
    """Return how many of K heads of this size to store as one head of `lanes` numbers; 1 if they do not fill it.

    `lanes` None: those of the current platform. Devices split stored heads, and each needs all stored heads of its own.
    """
    lanes = LANES.get(platform(), 1) if lanes is None else lanes
    # 128 lanes, H = 64: 2 heads
    together = lanes // size if size and lanes % size == 0 else 1
    return together if kv_heads % (together * num_shards("kv_heads")) == 0 else 1
