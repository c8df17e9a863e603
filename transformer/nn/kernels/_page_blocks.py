"""Attention to a paged KV cache in plain JAX: a running (online) softmax over blocks of pages.

Only the blocks up to the longest row are read, so a decoding step takes as long as the texts are, and not as long as
the page table is. The result of a row does not depend on the other rows, bit by bit: a block after the end of a row
adds exact zeros to its sums.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import Attended, Query
from transformer.nn._masks import Mask
from transformer.nn.kernels._blockwise import by_group, first_softmax, next_softmax
from transformer.nn.kernels._contract import NO_PAGES, AttentionSpec, bias_block

BLOCK_KEYS = 256
"""maximum number of keys per block"""
BLOCK_BYTES = 4 * 2**20
"""size of the keys and values of a block in all rows: they then fit in the cache of a CPU (docs/serving.md)"""

PAGE_BLOCKS_REASONS = dict.fromkeys(("weights", "dropout"), "it is for decoding")
"""option -> why the kernel does not support it"""


def page_blocks_limits(spec: AttentionSpec) -> str | None:
    """Return why the kernel does not support a call; None if it does. The text follows "can't"."""
    if spec.pages is None:
        return NO_PAGES
    if spec.pages.value_dim == 0:
        return "compute values from keys (MLA): it reads both from the pool"
    return None


def page_blocks_attention(query: Query, key: None, value: None, spec: AttentionSpec) -> tuple[Attended, None]:
    """Attend to the pages of each row, block by block (Dao et al. 2022, arXiv 2205.14135, algorithm 1).

    Args:
        query: (B, T, N, H).
        key: not used.
        value: not used.
        spec: pages, mask, scale, softcap, bias and sinks.

    Returns:
        (B, T, N, Hv), of which the result of padding is undefined; and None.
    """
    cache = spec.pages
    mask = spec.mask.shifted(spec.start) & Mask.lengths(cache.row_lengths)
    batch, num_queries, num_heads, head_dim = query.shape
    groups = num_heads // cache.kv_heads
    grouped = query.reshape(batch, num_queries, cache.kv_heads, groups, head_dim)
    pages = pages_per_block(cache, batch)
    size = pages * cache.page_size
    queries = jnp.arange(num_queries)
    shape = (batch, cache.kv_heads, groups, num_queries)

    def body(j, carry):
        key, value = cache.part(j * pages, pages)
        keys = j * size + jnp.arange(size)
        products = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
        scores = spec.capped(products)
        if spec.bias is not None:
            scores = scores + by_group(bias_block(spec.bias, queries, keys), shape[1:3])
        allowed = by_group(mask.block(queries, keys), shape[1:3])
        return next_softmax(carry, scores, allowed, value, lambda weights: weights)

    sinks = None if spec.sinks is None else spec.sinks.astype(jnp.float32).reshape(shape[1:3])
    start = first_softmax(shape, cache.value_dim, sinks)
    _, total, out = jax.lax.fori_loop(0, -(-jnp.max(cache.row_lengths) // size), body, start)
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]  # no visible key: the output is 0, not 0 / 0
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads, -1).astype(query.dtype), None


def pages_per_block(cache: Any, batch: int) -> int:
    """Return the number of pages of each row in a block: at least 1, and at most those of a row."""
    stored, width = cache.pages.shape[-2:]
    bytes_per_key = batch * stored * width * cache.pages.dtype.itemsize
    keys = min(BLOCK_KEYS, BLOCK_BYTES // max(bytes_per_key, 1))
    return min(cache.page_table.shape[-1], max(1, keys // cache.page_size))
