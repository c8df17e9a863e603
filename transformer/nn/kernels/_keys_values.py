"""What queries attend to: keys and values in arrays, in the slots of a `KVCache`, or in pages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax

from transformer.nn._axes import Attended, Leaf, Query, Weights
from transformer.nn._caches import KVCache, attended_of_stored, query_of_stored
from transformer.nn._masks import Mask
from transformer.nn.kernels import PAGED_KERNELS, choose
from transformer.nn.kernels._contract import AttentionShapes, AttentionSpec
from transformer.nn.kernels._dot_product import attend

FEW_QUERIES = 32
"""maximum number of queries per row that read a cache of heads stored together without separating them"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeysValues:
    """Keys and values of a layer: arrays, or those of a cache.

    Later layers without own ones can read them (Brandon et al. 2024, arXiv 2405.12981).
    """

    key: Leaf | None = None
    """(B, S, K, H), rotated; None: those in the cache"""
    value: Leaf | None = None
    """(B, S, K, Hv); None: those in the cache"""
    positions: Leaf | None = None
    """(B, S), positions of the keys; None: keys of a context, which have none"""
    cache: Leaf | None = None
    """the `KVCache` or `PagedKVCache` of the layer, with the new tokens; None: no cache"""
    start: Leaf | None = None
    """(B,), number of tokens in the cache before the new ones"""

    def attend(self, query: Query, spec: AttentionSpec, implementation: str) -> tuple[Attended, Weights | None]:
        """Compute attention of rotated queries (B, T, N, H), the new tokens; see `attend`."""
        if self.cache is None:
            return attend(query, self.key, self.value, spec, implementation)
        if self.key is None and not isinstance(self.cache, KVCache):
            return self._attend_to_pages(query, spec, implementation)
        spec = self._without_empty_slots(spec)
        if self.key is not None:
            return attend(query, self.key, self.value, spec, implementation)
        return _attend_to_slots(query, self.cache, spec, implementation)

    def _without_empty_slots(self, spec: AttentionSpec) -> AttentionSpec:
        # Attend to all S slots of the cache. Query index 0 is key index `start`, and the mask hides empty slots: they
        # contain zeros, whose score of 0 would still get weight.
        mask = spec.mask.shifted(self.start) & Mask.lengths(self.cache.row_lengths)
        return dataclasses.replace(spec, mask=mask)

    def _attend_to_pages(
        self, query: Query, spec: AttentionSpec, implementation: str
    ) -> tuple[Attended, Weights | None]:
        """Attend from the last T tokens of each row, whose result is undefined for padding, to the pages of the row."""
        cache = self.cache
        shapes = AttentionShapes(
            num_queries=query.shape[1],
            num_keys=cache.page_table.shape[-1] * cache.page_size,  # S = M Q slots per row, empty ones included
            head_dim=query.shape[3],
            value_dim=cache.value_dim,
            dtype=query.dtype,
        )
        in_pages = dataclasses.replace(spec, pages=cache, start=self.start, shapes=shapes)
        name = choose(implementation, in_pages)
        if name in PAGED_KERNELS:
            return PAGED_KERNELS[name].run(query, None, None, in_pages)
        return attend(query, *cache.whole(), self._without_empty_slots(spec), implementation)


def _attend_to_slots(
    query: Query, cache: KVCache, spec: AttentionSpec, implementation: str
) -> tuple[Attended, Weights | None]:
    """Attend to all slots of a cache.

    For few queries, heads that are stored together are read together, as one head of W numbers: a decoding step then
    reads the cache in place. Its multiplications, of which it has few, take W / H times as many FLOPs. For more
    queries, the heads are separated first, which copies the cache.
    """
    if cache.heads_per_stored == 1 or query.shape[1] > FEW_QUERIES:
        return attend(query, *cache.whole(), spec, implementation)
    (key, value), head_dim, together = cache.stored(), query.shape[-1], cache.heads_per_stored
    # (B, T, N, H) -> (B, T, N, W), attend to keys and values (B, S, K', W), -> (B, T, N, W) -> (B, T, N, Hv). The scale
    # stays 1 / sqrt(H): the zeros in a query add nothing to q . k.
    kv_heads = key.shape[2] * together
    query = query_of_stored(query, kv_heads, together, key.shape[3])
    out, weights = attend(query, key, value, spec, implementation)
    return attended_of_stored(out, kv_heads, together, head_dim), weights
