"""Proposals of rows in slots for speculative decoding: by a draft model with its own pages, or by a lookup."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.generate._decoding import decode_step
from transformer.generate._lookup import PromptLookup, looked_up
from transformer.generate._row_pages import pools_of, row_cache
from transformer.generate._rows import RowMasks, Rows, choose_in_rows
from transformer.nn._axes import Array, Int
from transformer.nn.models._causal_lm import CausalLM


@dataclass(frozen=True)
class Proposer:
    """How rows propose tokens; a static argument of compiled programs."""

    source: CausalLM | PromptLookup | None
    """a draft model with unstacked layers, a lookup in the text, or None"""
    tokens: int
    """Z, maximum number of tokens to propose per step"""

    @property
    def draft(self) -> CausalLM | None:
        """The draft model; None: there is none."""
        return self.source if isinstance(self.source, CausalLM) else None


NO_PROPOSER = Proposer(None, 0)
"""no proposals: each step generates one token per row"""


def propose(
    proposer: Proposer,
    draft_params: Any,
    rows: Rows,
    table: Int[Array, "R M"],
    tokens: Int[Array, " R"],
    suppressed: Int[Array, " S"],
) -> tuple[Rows, Int[Array, "R Z"], Int[Array, " R"]]:
    """Propose the tokens after `tokens` (R,), which the cache does not contain yet.

    A row proposes at most one token fewer than it may still generate, and none if it has a constraint.

    Returns:
        The slots, the proposals (R, Z), and how many of them count, (R,).
    """
    if proposer.source is None:
        return rows, jnp.zeros((len(tokens), 0), jnp.int32), jnp.zeros((len(tokens),), jnp.int32)
    most = jnp.where(rows.running & rows.proposes, jnp.clip(rows.left - 1, 0, proposer.tokens), 0)
    if proposer.draft is None:
        found = looked_up(rows.text, rows.lengths + 1, proposer.source)
        return rows, found, jnp.where(found[:, 0] >= 0, most, 0)
    rows, found = _drafted(proposer, draft_params, rows, table, tokens, most, suppressed)
    return rows, found, most


def _drafted(
    proposer: Proposer,
    draft_params: Any,
    rows: Rows,
    table: Int[Array, "R M"],
    tokens: Int[Array, " R"],
    most: Int[Array, " R"],
    suppressed: Int[Array, " S"],
) -> tuple[Rows, Int[Array, "R Z"]]:
    """Sample `most` (R,) tokens of each row with the draft model.

    It samples with the settings and with the noise of the model at the same position, so that it proposes the token
    that the model samples from similar logits.
    """
    masks = RowMasks.blank(*rows.logits.shape)

    def one_more(carry, i):
        tokens, history, pools = carry
        # The last proposal is read too, in case it is accepted: the caches of both models contain the same tokens.
        live = rows.running & (most > 0) & (i <= most)
        cache = row_cache(proposer.draft, pools, table, rows.lengths + i, live.astype(jnp.int32))
        logits, cache = decode_step(
            proposer.draft, draft_params, jnp.where(live, jnp.maximum(tokens, 0), 0), cache, None
        )
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.lengths + i + 1)
        found = choose_in_rows(logits.astype(jnp.float32), keys, rows.sampling, history, masks, suppressed)
        return (found, history.add(found, live & (found >= 0)), pools_of(cache)), found

    start = tokens, rows.history, rows.draft_pools
    (_, _, pools), found = jax.lax.scan(one_more, start, jnp.arange(proposer.tokens + 1))
    return dataclasses.replace(rows, draft_pools=pools), found[:-1].T
