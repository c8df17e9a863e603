"""The paged KV cache of rows that enter and leave: pools of pages on the device, tables and lengths as arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from transformer.nn._axes import Array, Int, Leaf, Lengths
from transformer.nn._paged import PagedKVCache, paged_cache
from transformer.nn.models._causal_lm import CausalLM


def blank_pools(model: CausalLM, num_pages: int, page_size: int) -> list[Leaf]:
    """Return the pools of P pages of all layers, (P, Q, C, W) each, for a model with unstacked layers."""
    return pools_of(paged_cache(model, rows=1, pages_per_row=1, num_pages=num_pages, page_size=page_size))


def row_cache(
    model: CausalLM,
    pools: list[Leaf],
    table: Int[Array, "B M"],
    lengths: Lengths,
    counts: Lengths,
    text_lengths: Lengths | None = None,
) -> Any:
    """Return the cache of B rows for the next call of the model.

    Args:
        model: a `CausalLM` with unstacked layers.
        pools: (P, Q, C, W) each, in the order of `pools_of`.
        table: (B, M), pages of each row.
        lengths: (B,), number of tokens of each row in its pages.
        counts: (B,), how many of the tokens of the call belong to each row; the others are not stored.
        text_lengths: (B,), number of tokens of the texts of which the call reads a part, for rotary scaling that
            depends on it; None: the texts end with the tokens of the call.
    """
    rows, pages = table.shape
    shapes = jax.eval_shape(lambda: paged_cache(model, rows=rows, pages_per_row=pages, num_pages=1, page_size=1))
    left = iter(pools)

    def filled(node):
        given = {"pages": next(left), "page_table": table, "length": lengths, "chunk_length": counts}
        given |= {"text_length": text_lengths}
        return dataclasses.replace(node, **given) if _is_paged(node) else node

    return jax.tree.map(filled, shapes, is_leaf=_is_paged)


def pools_of(cache: Any) -> list[Leaf]:
    """Return the pools of a paged cache, a tree."""
    return [node.pages for node in jax.tree.leaves(cache, is_leaf=_is_paged) if _is_paged(node)]


def _is_paged(node: Any) -> bool:
    return isinstance(node, PagedKVCache)
