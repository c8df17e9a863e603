"""Caches of a decoder: keys and values of self-attention for previous tokens, and those of the context."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import DType, Key, Leaf, Lengths, Positions, Value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of self-attention. Of the S slots of row b the first `length[b]` are filled.

    After a prompt that was padded on the right, `set_cache_length` sets the true length of each row. The keys of the
    padding stay in later slots, where the mask hides them until new tokens overwrite them.

    Heads come before slots, which is the order that the matrix multiplications of attention read, so that a decoding
    step does not have to copy the cache into another order.
    """

    key: Leaf
    """(B, K, S, H)"""
    value: Leaf
    """(B, K, S, Hv)"""
    positions: Leaf
    """(B, S), position of each key, for schemes whose bias depends on the distance"""
    length: Leaf
    """(B,), number of filled slots in each row"""

    @staticmethod
    def create(batch: int, length: int, kv_heads: int, head_dim: int, value_dim: int, dtype: DType) -> KVCache:
        """Return an empty cache of `length` slots for each of `batch` rows."""
        return KVCache(
            key=jnp.zeros((batch, kv_heads, length, head_dim), dtype),
            value=jnp.zeros((batch, kv_heads, length, value_dim), dtype),
            positions=jnp.zeros((batch, length), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def append(self, key: Key, value: Value, positions: Positions) -> KVCache:
        """Return the cache with T more keys and values in each row, from slot `length[b]` on.

        Tokens past the last slot are dropped: inside jit the length is not known, so this can't be an error.

        Raises:
            ValueError: T is larger than the number of slots.
        """
        if key.shape[1] > self.positions.shape[1]:
            raise ValueError(
                f"{key.shape[1]} tokens don't fit a cache of {self.positions.shape[1]} slots: create a longer cache "
                f"(init_cache)."
            )
        rows = jnp.arange(key.shape[0])[:, None]
        slots = self.length[:, None] + jnp.arange(key.shape[1])[None, :]
        # Rows may have different lengths, so each row writes to its own slots. Index arrays on both sides of a slice
        # put their axes first: the target of [rows, :, slots] is (B, T, K, H), the shape of `key`.
        return KVCache(
            key=self.key.at[rows, :, slots].set(key.astype(self.key.dtype), mode="drop"),
            value=self.value.at[rows, :, slots].set(value.astype(self.value.dtype), mode="drop"),
            positions=self.positions.at[rows, slots].set(positions, mode="drop"),
            length=self.length + key.shape[1],
        )

    def whole(self) -> tuple[Key, Value]:
        """Return keys (B, S, K, H) and values (B, S, K, Hv) of all slots, the axis order of `dot_product_attention`."""
        # (B, K, S, H) -> (B, S, K, H). Kernels contract over H for each (B, K), so XLA can read the cache in place.
        return self.key.transpose(0, 2, 1, 3), self.value.transpose(0, 2, 1, 3)


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

    whole = KVCache.whole


def _is_kv_cache(node: Any) -> bool:
    return isinstance(node, KVCache)


def cache_length(cache: Any) -> Lengths:
    """Return the number of tokens in each row of a (nested) cache, (B,)."""
    first = next(node for node in jax.tree.leaves(cache, is_leaf=_is_kv_cache) if _is_kv_cache(node))
    return first.length.reshape(-1, first.length.shape[-1])[0]  # stacked layers have a leading axis; all are equal


def set_cache_length(cache: Any, lengths: Lengths) -> Any:
    """Return the cache, a tree, with row b cut to its first `lengths[b]` tokens: after a padded prompt, or to go back.

    Only the length changes. Keys past the new length stay in their slots until `append` overwrites them.
    """

    def with_length(node):
        if not _is_kv_cache(node):
            return node
        return dataclasses.replace(node, length=jnp.broadcast_to(lengths, node.length.shape).astype(jnp.int32))

    return jax.tree.map(with_length, cache, is_leaf=_is_kv_cache)


def lengthen_cache(cache: Any, room: int) -> Any:
    """Return the cache, a tree, with `room` more slots for self-attention; layers may be stacked on a leading axis."""
    behind = {"key": 1, "value": 1, "positions": 0}  # number of axes after the axis of slots

    def longer(array, after):
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1 - after) + [(0, room)] + [(0, 0)] * after)

    def of(node):
        if not _is_kv_cache(node):
            return node
        parts = {name: longer(getattr(node, name), after) for name, after in behind.items()}
        return dataclasses.replace(node, **parts)

    return jax.tree.map(of, cache, is_leaf=_is_kv_cache)
