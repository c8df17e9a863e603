"""Caches of a decoder: keys and values of self-attention for previous tokens, and those of the context.

A call that doesn't fit its cache is an error outside jit. Inside jit, where lengths are unknown, its result is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import (
    Array,
    Attended,
    Bool,
    DType,
    Float,
    Hidden,
    Int,
    Key,
    Leaf,
    Lengths,
    Positions,
    PyTree,
    Query,
    Value,
    static,
)

FEW_QUERIES = 32
"""maximum number of queries per row that read a cache of heads stored together without separating them"""


class SelfAttentionCache:
    """Base class of caches of self-attention: `KVCache`, and `PagedKVCache` of `_paged.py`."""

    length: Leaf
    layer: Leaf | None

    @property
    def row_lengths(self) -> Lengths:
        """Number of tokens in each row of this layer, (B,)."""
        return of_layer(self.length, self.layer)

    @property
    def place(self) -> tuple[()] | tuple[Int[Array, ""]]:
        """Index of this layer in arrays that have a leading axis of layers."""
        return () if self.layer is None else (self.layer,)

    @property
    def key_positions(self) -> Positions:
        """Position of each key of this layer, (B, S)."""
        raise NotImplementedError(f"{type(self).__name__} does not define the positions of its keys.")

    def fits(self, num_tokens: int) -> Bool[Array, "B T"]:
        """Return which of the next T tokens of each row of this layer have a slot; padding needs none."""
        raise NotImplementedError(f"{type(self).__name__} does not define which tokens fit.")

    def check_room(self, num_tokens: int) -> None:
        """Raise ValueError if the next T tokens of a row don't fit, as far as the lengths are known (not in jit)."""

    def append(self, key: Key, value: Value, positions: Positions) -> SelfAttentionCache:
        """Return the cache with T more keys and values in each row."""
        raise NotImplementedError(f"{type(self).__name__} does not define how keys are appended.")

    def whole(self) -> tuple[Key, Value]:
        """Return keys (B, S, K, H) and values (B, S, K, Hv) of all slots."""
        raise NotImplementedError(f"{type(self).__name__} does not define how keys are read.")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache(SelfAttentionCache):
    """Keys and values of self-attention. Of the S slots of row b the first `length[b]` are filled.

    After a prompt that was padded on the right, `set_cache_length` sets the true length of each row. The keys of the
    padding stay in later slots, where the mask hides them until new tokens overwrite them.

    Heads come before slots, which is the order that the matrix multiplications of attention read, so that a decoding
    step does not have to copy the cache into another order.

    A TPU pads heads to 128 numbers. Several smaller heads can therefore be stored as one head: K' heads of W numbers,
    with K' W = K H. Otherwise K' = K and W = H.
    """

    key: Leaf
    """(B, K', S, W)"""
    value: Leaf
    """(B, K', S, W); if heads are not stored together, (B, K, S, Hv)"""
    positions: Leaf
    """(B, S), position of each key, for schemes whose bias depends on the distance"""
    length: Leaf
    """(B,), number of filled slots in each row"""
    layer: Leaf | None = None
    """(), index of the layer that is read and written, if all arrays have a leading axis of layers; otherwise None"""
    heads_per_stored: int = static(1)
    """number of key heads that are stored as one head"""

    @staticmethod
    def create(
        batch: int, length: int, kv_heads: int, head_dim: int, value_dim: int, dtype: DType, heads_per_stored: int = 1
    ) -> KVCache:
        """Return an empty cache of `length` slots for each of `batch` rows.

        Args:
            batch: B.
            length: S.
            kv_heads: K, a multiple of `heads_per_stored`.
            head_dim: H.
            value_dim: Hv; equal to H if `heads_per_stored` is above 1.
            dtype: data type of keys and values.
            heads_per_stored: number of key heads that are stored as one head.
        """
        heads = kv_heads // heads_per_stored  # K'; W = H heads_per_stored
        return KVCache(
            key=jnp.zeros((batch, heads, length, head_dim * heads_per_stored), dtype),
            value=jnp.zeros((batch, heads, length, value_dim * heads_per_stored), dtype),
            positions=jnp.zeros((batch, length), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
            heads_per_stored=heads_per_stored,
        )

    @property
    def key_positions(self) -> Positions:
        """Position of each key of this layer, (B, S)."""
        return of_layer(self.positions, self.layer)

    def fits(self, num_tokens: int) -> Bool[Array, "B T"]:
        """Return which of the next T tokens of each row of this layer have a slot."""
        return self._next_slots(num_tokens) < self.positions.shape[-1]

    def check_room(self, num_tokens: int) -> None:
        """Check that the next T tokens of each row fit, as far as the lengths are known.

        Raises:
            ValueError: T is larger than the number of slots, or than that of the free slots of a row.
        """
        slots = self.positions.shape[-1]
        if num_tokens > slots:
            raise ValueError(
                f"{num_tokens} tokens don't fit a cache of {slots} slots: create a longer cache (init_cache)."
            )
        # Unknown lengths count as 0, which raises nothing further: the check above has covered T alone.
        (length,) = known_rows(self.length) or (np.zeros(1, np.int32),)
        if length.max(initial=0) + num_tokens > slots:
            row = int(length.argmax())
            raise ValueError(
                f"the KV cache is full: expected room for {num_tokens} more tokens in each row, but row {row} has "
                f"{length[row]} tokens in {slots} slots. Create a cache of at least {length[row] + num_tokens} slots "
                f"(init_cache), or generate fewer tokens."
            )

    def append(self, key: Key, value: Value, positions: Positions) -> KVCache:
        """Return the cache with T more keys and values in each row, from slot `length[b]` on.

        Inside jit the length is not known: tokens past the last slot are dropped there, and counted. Attention makes
        its result NaN with `nan_without_room`.

        Raises:
            ValueError: T is larger than the number of slots; outside jit, than that of the free slots of a row.
        """
        self.check_room(key.shape[1])
        slots = self._next_slots(key.shape[1])
        rows = jnp.arange(key.shape[0])
        # With `:` for the heads, XLA for TPUs would put heads last but one in memory, to write all heads of a token at
        # once, and copy the cache of each layer into the order that attention reads. Each axis is (B, T, K').
        places = rows[:, None, None], jnp.arange(self.key.shape[-3])[None, None, :], slots[:, :, None]
        if self.heads_per_stored > 1:
            # (B, T, K, H) -> (B, T, K', W)
            key, value = (new.reshape(*new.shape[:2], -1, self.key.shape[-1]) for new in (key, value))
        if key.shape[:2] == (1, 1) and self.layer is None:
            keys, values = (self._with_token(*pair) for pair in ((self.key, key), (self.value, value)))
        else:
            keys = self.key.at[*self.place, *places].set(key.astype(self.key.dtype), mode="drop")
            values = self.value.at[*self.place, *places].set(value.astype(self.value.dtype), mode="drop")
        return dataclasses.replace(
            self,
            key=keys,
            value=values,
            positions=self.positions.at[*self.place, rows[:, None], slots].set(positions, mode="drop"),
            length=self.length.at[*self.place, :].add(key.shape[1]),
        )

    def _with_token(
        self, slots: Float[Array, "1 K S ..."], new: Float[Array, "1 1 K ..."]
    ) -> Float[Array, "1 K S ..."]:
        """Return the slots of one row with its next token; without a free slot they stay as they are."""
        # A scatter of one token takes longer on a GPU than writing a slice, which is in place too.
        new, place = new.astype(slots.dtype).transpose(0, 2, 1, 3), (0, 0, self.length[0], 0)
        last = jax.lax.dynamic_slice(slots, place, new.shape)  # the last slot if there is none
        fits = self.length[0] < slots.shape[2]
        return jax.lax.dynamic_update_slice(slots, jnp.where(fits, new, last), place)

    def _next_slots(self, num_tokens: int) -> Int[Array, "B T"]:
        # Rows may have different lengths, so each row writes to its own slots.
        return self.row_lengths[:, None] + jnp.arange(num_tokens)[None, :]

    def stored(self) -> tuple[Key, Value]:
        """Return all slots of the stored heads, twice (B, S, K', W), in the axis order of `dot_product_attention`."""
        # (B, K', S, W) -> (B, S, K', W). Kernels contract over W for each (B, K'), so XLA can read the cache in place.
        key, value = (of_layer(array, self.layer) for array in (self.key, self.value))
        return key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)

    def whole(self) -> tuple[Key, Value]:
        """Return keys (B, S, K, H) and values (B, S, K, Hv) of all slots, the axis order of `dot_product_attention`."""
        if self.heads_per_stored == 1:
            return self.stored()
        size = self.key.shape[-1] // self.heads_per_stored
        key, value = (array.reshape(*array.shape[:2], -1, size) for array in self.stored())
        return key, value

    def packed(self, query: Query) -> tuple[Array, Array, Array, Callable[[Array], Attended]]:
        """Return queries, keys and values that attention reads fast, and the function that its result goes through.

        For few queries, heads that are stored together are read together, as one head of W numbers: a decoding step
        then reads the cache in place. Its multiplications, of which it has few, take W / H times as many FLOPs. For
        more queries, the heads are separated first, which copies the cache.
        """
        if self.heads_per_stored == 1 or query.shape[1] > FEW_QUERIES:
            return query, *self.whole(), lambda out: out
        (key, value), head_dim, together = self.stored(), query.shape[-1], self.heads_per_stored
        # (B, T, N, H) -> (B, T, N, W), attend to keys and values (B, S, K', W), -> (B, T, N, W) -> (B, T, N, Hv). The
        # scale stays 1 / sqrt(H): the zeros in a query add nothing to q . k.
        kv_heads = key.shape[2] * together
        query = query_of_stored(query, kv_heads, together, key.shape[3])
        return query, key, value, lambda out: attended_of_stored(out, kv_heads, together, head_dim)


def query_of_stored(query: Query, kv_heads: int, together: int, width: int) -> Float[Array, "B T N W"]:
    """Return queries (B, T, N, H) of the size W of a stored head: zeros remove other heads from q . k."""
    size = width // together
    query = jnp.pad(query, [(0, 0)] * 3 + [(0, size - query.shape[-1])])
    places = jnp.where(_own_place(query.shape[2], kv_heads, together), query[:, :, :, None, :], 0)
    return places.reshape(*query.shape[:3], width)  # (B, T, N, together, size) -> (B, T, N, W)


def attended_of_stored(out: Float[Array, "B T N W"], kv_heads: int, together: int, value_dim: int) -> Attended:
    """Return the results (B, T, N, Hv) for each query's own value head of results for stored heads (B, T, N, W)."""
    *sizes, num_heads, width = out.shape
    # (B, T, N, W) -> (B, T, N, together, W / together); all but one of the `together` terms are zero
    places = out.reshape(*sizes, num_heads, together, width // together)
    return jnp.where(_own_place(num_heads, kv_heads, together), places, 0).sum(3)[..., :value_dim]


def _own_place(num_heads: int, kv_heads: int, together: int) -> Bool[Array, "N n 1"]:
    """Return which of the heads that are stored together belongs to each query head."""
    head = jnp.arange(num_heads) // (num_heads // kv_heads)  # key head of each query head
    # Key head k is number k % together of the heads that are stored together.
    return (head[:, None] % together == jnp.arange(together)[None, :])[:, :, None]


def of_layer(array: Array, layer: Int[Array, ""] | None) -> Array:
    """Return the part of one layer, (...), of an array (L, ...) for all layers; None: the array has no such axis."""
    return array if layer is None else jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)


def known_rows(*arrays: Int[Array, "..."]) -> tuple[np.ndarray, ...] | None:
    """Return arrays of a cache for one layer, (B, ...), on the host; None if a value is unknown, as inside jit.

    A leading axis of layers, which have equal values, is left out: the first array is then (L, B) instead of (B,).
    """
    layers = arrays[0].ndim - 1
    # An array that is spread over several processes can't be read by one of them.
    if any(isinstance(one, jax.core.Tracer) or not getattr(one, "is_fully_addressable", True) for one in arrays):
        return None
    return tuple(np.asarray(one)[(0,) * layers] for one in arrays)


def check_room(cache: PyTree, num_tokens: int) -> None:
    """Raise ValueError if T more tokens don't fit a (nested) cache: in the loop over layers, lengths are unknown."""
    for node in _nodes(cache):
        node.check_room(num_tokens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextCache:
    """Keys and values of cross-attention, computed once from the context; None until then. Layout as in `KVCache`."""

    key: Leaf | None = None
    """(B, K, S, H)"""
    value: Leaf | None = None
    """(B, K, S, Hv)"""

    @staticmethod
    def of(key: Key, value: Value) -> ContextCache:
        """Return a cache with the keys (B, S, K, H) and values (B, S, K, Hv) of a context."""
        return ContextCache(key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3))

    def whole(self) -> tuple[Key, Value]:
        """Return keys (B, S, K, H) and values (B, S, K, Hv), the axis order of `dot_product_attention`."""
        return self.key.transpose(0, 2, 1, 3), self.value.transpose(0, 2, 1, 3)


def nan_without_room(out: Hidden, fits: Bool[Array, "B T"], mask: Any) -> Hidden:
    """Return the result (B, T, D) of attention with a cache, NaN where keys are missing because the cache is full.

    `fits` (B, T) says which tokens have a slot. If the mask is causal, a token that fits reads no token that doesn't.
    """
    # Without causality each token of the row may read the missing keys: (B, T) -> (B, 1).
    if not mask.is_causal or mask.query_groups is not None or mask.query_places is not None:
        fits = fits.all(1, keepdims=True)
    return jnp.where(fits[:, :, None], out, jnp.nan)


def count_tokens(x: Hidden, cache: SelfAttentionCache | None) -> SelfAttentionCache | None:
    """Advance the cache of a layer without own keys by the T tokens of x (B, T, D): it only counts tokens."""
    if cache is None:
        return None
    nothing = jnp.zeros((*x.shape[:2], 0, 0), x.dtype)  # (B, T, K = 0, H = 0)
    return cache.append(nothing, nothing, jnp.zeros(x.shape[:2], jnp.int32))


def _is_cache(node: object) -> bool:
    return isinstance(node, SelfAttentionCache)


def _nodes(cache: PyTree) -> list[SelfAttentionCache]:
    return [node for node in jax.tree.leaves(cache, is_leaf=_is_cache) if _is_cache(node)]


def with_shared_places(cache: PyTree) -> PyTree:
    """Return a cache, a tree with one node per layer, whose layers share the arrays of lengths and positions.

    They are equal in all layers. In a loop over tokens, XLA then keeps one of each, and computes what depends on them
    once per token instead of once per layer.
    """
    # A layer without own keys only counts tokens, and stores no positions.
    nodes = [node for node in _nodes(cache) if isinstance(node, KVCache) and node.layer is None and node.key.size]
    first = nodes[0] if nodes else None

    def shared(node):
        if not isinstance(node, KVCache) or first is None or node.positions.shape != first.positions.shape:
            return node
        return dataclasses.replace(node, positions=first.positions, length=first.length)

    return jax.tree.map(shared, cache, is_leaf=_is_cache)


def cache_length(cache: PyTree) -> Lengths:
    """Return the number of tokens in each row of a (nested) cache, (B,)."""
    first = _nodes(cache)[0]
    return first.length.reshape(-1, first.length.shape[-1])[0]  # stacked layers have a leading axis; all are equal


def next_positions(cache: PyTree) -> Int[Array, " B"]:
    """Return the next position of each row, (B,): after the largest position of the tokens in the cache."""
    # It differs from the number of tokens if these have several coordinates, such as the rows and columns of an image.
    # A cache of pages stores no positions: there it is the number of tokens.
    first, lengths = _nodes(cache)[0], cache_length(cache)
    if not isinstance(first, KVCache):
        return lengths
    positions = first.positions.reshape(-1, *first.positions.shape[-2:])[0]  # stacked layers have a leading axis
    last = jnp.take_along_axis(positions, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(lengths > 0, last + 1, 0)


def set_cache_length(cache: PyTree, lengths: Lengths) -> PyTree:
    """Cut row b of the cache, a tree, to its first `lengths[b]` tokens: after a padded prompt, or to go back."""
    # Only the length changes. Keys past the new length stay in their slots until `append` overwrites them.

    def with_length(node):
        if not _is_cache(node):
            return node
        return dataclasses.replace(node, length=jnp.broadcast_to(lengths, node.length.shape).astype(jnp.int32))

    return jax.tree.map(with_length, cache, is_leaf=_is_cache)


def lengthen_cache(cache: PyTree, room: int) -> PyTree:
    """Return the cache, a tree, with `room` more slots for self-attention; layers may be stacked on a leading axis."""
    behind = {"key": 1, "value": 1, "positions": 0}  # number of axes after the axis of slots

    def longer(array, after):
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1 - after) + [(0, room)] + [(0, 0)] * after)

    def of(node):
        if not isinstance(node, KVCache):
            return node
        parts = {name: longer(getattr(node, name), after) for name, after in behind.items()}
        return dataclasses.replace(node, **parts)

    return jax.tree.map(of, cache, is_leaf=lambda node: isinstance(node, KVCache))
