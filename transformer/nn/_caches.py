"""What a decoder keeps of the tokens before: keys and values of self-attention, and those of the context."""

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
    """Keys and values of self-attention so far. `length[b]` of the S slots of row b are filled; the next ones go after.

    A row whose prompt was padded on the right gets its true length set (`set_cache_length`): what lies behind it is
    hidden by causality until it is overwritten. Keys and values lie as the products of attention read them: no step
    has to turn them.
    """

    key: Leaf
    """(B, K, S, H)"""
    value: Leaf
    """(B, K, S, Hv)"""
    positions: Leaf
    """(B, S), position of each key, for schemes that bias by distance"""
    length: Leaf
    """(B,)"""

    @staticmethod
    def create(batch: int, length: int, kv_heads: int, head_dim: int, value_dim: int, dtype: DType) -> KVCache:
        """An empty cache of `length` slots for each of `batch` rows."""
        return KVCache(
            key=jnp.zeros((batch, kv_heads, length, head_dim), dtype),
            value=jnp.zeros((batch, kv_heads, length, value_dim), dtype),
            positions=jnp.zeros((batch, length), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def append(self, key: Key, value: Value, positions: Positions) -> KVCache:
        """The cache with T more keys and values a row. What would go past the last slot is dropped; ValueError: T is
        more than all slots.
        """
        if key.shape[1] > self.positions.shape[1]:
            raise ValueError(
                f"{key.shape[1]} tokens don't fit a cache of {self.positions.shape[1]} slots: make a longer one "
                f"(init_cache)."
            )
        rows = jnp.arange(key.shape[0])[:, None]
        slots = self.length[:, None] + jnp.arange(key.shape[1])[None, :]
        return KVCache(
            key=self.key.at[rows, :, slots].set(key.astype(self.key.dtype), mode="drop"),
            value=self.value.at[rows, :, slots].set(value.astype(self.value.dtype), mode="drop"),
            positions=self.positions.at[rows, slots].set(positions, mode="drop"),
            length=self.length + key.shape[1],
        )

    def whole(self) -> tuple[Key, Value]:
        """Keys (B, S, K, H) and values (B, S, K, Hv) of all slots, as `dot_product_attention` takes them."""
        return self.key.transpose(0, 2, 1, 3), self.value.transpose(0, 2, 1, 3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextCache:
    """Keys and values of cross-attention, computed once from the context; None until then. They lie as in `KVCache`."""

    key: Leaf | None = None
    """(B, K, S, H)"""
    value: Leaf | None = None
    """(B, K, S, Hv)"""

    @staticmethod
    def of(key: Key, value: Value) -> ContextCache:
        """A cache that holds these."""
        return ContextCache(key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3))

    whole = KVCache.whole


def _is_kv_cache(node: Any) -> bool:
    return isinstance(node, KVCache)


def cache_length(cache: Any) -> Lengths:
    """How many tokens each row of a (nested) cache holds, (B,)."""
    first = next(node for node in jax.tree.leaves(cache, is_leaf=_is_kv_cache) if _is_kv_cache(node))
    return first.length.reshape(-1, first.length.shape[-1])[0]  # layers in front, all alike


def set_cache_length(cache: Any, lengths: Lengths) -> Any:
    """The same cache, a tree, holding the first `lengths[b]` tokens of row b: after a padded prompt, or to go back."""

    def with_length(node):
        if not _is_kv_cache(node):
            return node
        return dataclasses.replace(node, length=jnp.broadcast_to(lengths, node.length.shape).astype(jnp.int32))

    return jax.tree.map(with_length, cache, is_leaf=_is_kv_cache)


def lengthen_cache(cache: Any, room: int) -> Any:
    """The same cache, a tree, with so many more slots for self-attention; layers may be stacked on an axis in front."""
    behind = {"key": 1, "value": 1, "positions": 0}  # axes behind that of slots

    def longer(array, after):
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1 - after) + [(0, room)] + [(0, 0)] * after)

    def of(node):
        if not _is_kv_cache(node):
            return node
        parts = {name: longer(getattr(node, name), after) for name, after in behind.items()}
        return dataclasses.replace(node, **parts)

    return jax.tree.map(of, cache, is_leaf=_is_kv_cache)
