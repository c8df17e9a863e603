"""The steps of rows in slots: sample a token in each row, propose more, and verify them in one call of the model.

A row gets the same tokens whatever is in the other slots, and however its steps are divided among calls: the proposals
of a row depend only on its own text, and every step reads the same number of tokens per row.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.generate._decoding import decode_chunk, decode_step
from transformer.generate._lookup import looked_up
from transformer.generate._loop import DecodeResult
from transformer.generate._rows import (
    MOST_STEPS,
    MOST_TOP,
    RowMasks,
    Rows,
    choose_in_rows,
    pools_of,
    row_cache,
    stored,
    whole,
)
from transformer.generate._speculative import NO_PROPOSER, Proposer
from transformer.nn._axes import Array, Bool, Float, Int, Leaf
from transformer.nn.models._causal_lm import CausalLM


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Steps(DecodeResult):
    """The tokens of one call of `advance`; N is `MOST_STEPS`."""

    top_tokens: Leaf
    """(R, N, A), the A most probable tokens, if the row wants them"""
    top_log_probabilities: Leaf
    """(R, N, A)"""
    proposed: Leaf
    """(R,), number of tokens that were proposed and verified"""
    accepted: Leaf
    """(R,), number of proposed tokens that the model sampled too"""


@functools.partial(jax.jit, static_argnames=("model", "proposer"), donate_argnames="rows")
def advance(
    model: CausalLM,
    params: Any,
    rows: Rows,
    table: Int[Array, "R M"],
    keep: Bool[Array, " R"],
    known: Int[Array, "R n"],
    masks: RowMasks,
    suppressed: Int[Array, " S"],
    limit: Int[Array, ""],
    until_free: Bool[Array, ""],
    *,
    proposer: Proposer = NO_PROPOSER,
    draft_params: Any = None,
) -> tuple[Rows, Steps]:
    """Make at most `limit` steps, each of which generates 1 to `proposer.tokens` + 1 tokens in each running row.

    Args:
        model: a `CausalLM` with unstacked layers.
        params: its parameters.
        rows: the slots.
        table: (R, M), pages of each row, with room for all tokens of this call.
        keep: (R,), rows that continue; the others are ended without a token.
        known: (R, MOST_STEPS), tokens that a row which is computed again has generated already; -1: none.
        masks: the tokens that are allowed in each step of this call; a row with a constraint may
            generate only one token that is not known.
        suppressed: (S,), ids that are never chosen.
        limit: maximum number of steps, at most `MOST_STEPS`.
        until_free: return as soon as a row has ended.
        proposer: how rows propose tokens.
        draft_params: parameters of the proposer's model, if it is one.
    """
    rows = dataclasses.replace(rows, running=rows.running & keep)
    start, width = rows.running, proposer.tokens + 1
    draw = functools.partial(_draw, known, suppressed)

    def unfinished(carry):
        rows, out = carry
        has_room = (out.counts <= MOST_STEPS - width).all()  # for all tokens of a step in the output
        is_free = until_free & (start & ~rows.running).any()
        return (out.steps.max() < limit) & has_room & rows.running.any() & ~is_free

    def step(carry):
        rows, out = carry
        out = dataclasses.replace(out, steps=out.steps + rows.running)
        tokens = draw(rows, out, masks)
        rows, out = _recorded(rows, out, tokens, rows.running)
        rows, proposals, counts = _propose(proposer, draft_params, rows, table, tokens, suppressed)
        # A row that does not run stores nothing: its pages may belong to another row by now.
        cache = row_cache(model, rows.pools, table, rows.lengths, jnp.where(rows.running, 1 + counts, 0))
        tokens = jnp.where(rows.running, tokens, 0)
        if proposer.tokens:
            chunk = jnp.maximum(jnp.concatenate([tokens[:, None], proposals], axis=1), 0)
            logits, cache = decode_chunk(model, params, chunk, cache)  # (R, Z + 1, V)
        else:
            logits, cache = decode_step(model, params, tokens, cache, None)
            logits = logits[:, None]
        logits = logits.astype(jnp.float32)
        rows = dataclasses.replace(
            rows, logits=logits[:, 0], lengths=rows.lengths + rows.running, pools=pools_of(cache)
        )
        out = dataclasses.replace(out, proposed=out.proposed + counts)
        return _verified(rows, out, proposals, counts, logits, functools.partial(draw, masks=masks.unconstrained()))

    rows, out = jax.lax.while_loop(unfinished, step, (rows, _no_steps(rows)))
    return stored(rows), whole(out)


def _draw(known: Int[Array, "R n"], suppressed: Int[Array, " S"], rows: Rows, out: Steps, masks: RowMasks):
    """Return the next token of each row, (R,): one that is known, or a sample from its logits."""
    keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.lengths)
    tokens = choose_in_rows(rows.logits, keys, rows.sampling, rows.history, masks, suppressed)
    again = jnp.take_along_axis(known, jnp.minimum(out.counts, known.shape[1] - 1)[:, None], axis=1)[:, 0]
    return jnp.where(again >= 0, again, tokens)


def _propose(
    proposer: Proposer,
    draft_params: Any,
    rows: Rows,
    table: Int[Array, "R M"],
    tokens: Int[Array, " R"],
    suppressed: Int[Array, " S"],
) -> tuple[Rows, Int[Array, "R Z"], Int[Array, " R"]]:
    """Propose the tokens after `tokens` (R,), which the cache does not contain yet.

    A row proposes at most one token fewer than it may still generate, and none if it has a constraint. A draft model
    samples with the settings and with the noise of the model at the same position, so that it proposes the token that
    the model samples from similar logits.

    Returns:
        The slots, the proposals (R, Z), and how many of them count, (R,).
    """
    if proposer.source is None:
        return rows, jnp.zeros((len(tokens), 0), jnp.int32), jnp.zeros((len(tokens),), jnp.int32)
    most = jnp.where(rows.running & rows.proposes, jnp.clip(rows.left - 1, 0, proposer.tokens), 0)
    if proposer.draft is None:
        found = looked_up(rows.text, rows.lengths + 1, proposer.source)
        return rows, found, jnp.where(found[:, 0] >= 0, most, 0)
    masks = RowMasks.blank(*rows.logits.shape)

    def one_more(carry, i):
        tokens, history, pools = carry
        # The last proposal is read too, in case it is accepted: the caches of both models contain the same tokens.
        live = rows.running & (most > 0) & (i <= most)
        cache = row_cache(proposer.draft, pools, table, rows.lengths + i, live.astype(jnp.int32))
        tokens = jnp.where(live, jnp.maximum(tokens, 0), 0)
        logits, cache = decode_step(proposer.draft, draft_params, tokens, cache, None)
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.lengths + i + 1)
        found = choose_in_rows(logits.astype(jnp.float32), keys, rows.sampling, history, masks, suppressed)
        return (found, history.add(found, live & (found >= 0)), pools_of(cache)), found

    start = tokens, rows.history, rows.draft_pools
    (_, _, pools), found = jax.lax.scan(one_more, start, jnp.arange(proposer.tokens + 1))
    return dataclasses.replace(rows, draft_pools=pools), found[:-1].T, most


def _verified(
    rows: Rows,
    out: Steps,
    proposals: Int[Array, "R Z"],
    counts: Int[Array, " R"],
    logits: Float[Array, "R T V"],
    draw: Any,
) -> tuple[Rows, Steps]:
    """Accept the proposals of each row up to the first one that is not the token which the row samples.

    A sample is a function of logits, settings, and of a key for row and position. So the accepted tokens are those of
    steps without proposals, for every sampling method; the token after them is sampled in the next step.

    Args:
        rows: the slots after the token before the proposals.
        out: the tokens so far.
        proposals: (R, Z).
        counts: (R,), number of proposals of each row that were read.
        logits: (R, Z + 1, V), after the token before the proposals, and after each proposal.
        draw: returns the next token of each row.
    """

    def unfinished(carry):
        i, live, _, _ = carry
        return (i < proposals.shape[1]) & live.any()

    def verify(carry):
        i, live, rows, out = carry
        tokens = draw(rows, out)
        right = live & (i < counts) & (tokens == proposals[:, i]) & (tokens >= 0)
        rows, out = _recorded(rows, out, tokens, right)
        live = right & rows.running
        following = jnp.where(live[:, None], logits[:, i + 1], rows.logits)
        rows = dataclasses.replace(rows, logits=following, lengths=rows.lengths + live)
        return i + 1, live, rows, dataclasses.replace(out, accepted=out.accepted + right)

    if not proposals.shape[1]:
        return rows, out
    return jax.lax.while_loop(unfinished, verify, (jnp.int32(0), rows.running & (counts > 0), rows, out))[2:]


def _no_steps(rows: Rows) -> Steps:
    slots, vocab_size = rows.logits.shape
    blank, top = DecodeResult.blank(slots, MOST_STEPS, scored=True), (slots, MOST_STEPS, min(MOST_TOP, vocab_size))
    return Steps(
        **vars(blank),
        top_tokens=jnp.zeros(top, jnp.int32),
        top_log_probabilities=jnp.zeros(top, jnp.float32),
        proposed=blank.counts,
        accepted=blank.counts,
    )


def _recorded(rows: Rows, out: Steps, tokens: Int[Array, " R"], wanted: Bool[Array, " R"]) -> tuple[Rows, Steps]:
    """Append a token, whose logits are `rows.logits`, to each row of `wanted` (R,), unless it ends the row."""
    grown = out.add(tokens[:, None], wanted.astype(jnp.int32), rows.ends, rows.lengths[:, None], rows.logits)
    new = grown.counts > out.counts
    slots, most = jnp.arange(tokens.shape[0]), out.top_tokens.shape[-1]
    columns = jnp.where(new, out.counts, MOST_STEPS)  # past the end: mode="drop" ignores the other rows

    def top():
        values, ids = jax.lax.top_k(jax.nn.log_softmax(rows.logits, -1), most)
        return ids.astype(jnp.int32), values

    def none():
        return jnp.zeros((len(tokens), most), jnp.int32), jnp.zeros((len(tokens), most), jnp.float32)

    ids, values = jax.lax.cond((rows.sampling.top & new).any(), top, none)
    out = dataclasses.replace(
        grown,
        top_tokens=out.top_tokens.at[slots, columns].set(ids, mode="drop"),
        top_log_probabilities=out.top_log_probabilities.at[slots, columns].set(values, mode="drop"),
    )
    left, text = rows.left - new, rows.text
    if text is not None:
        text = text.at[slots, jnp.where(new, rows.lengths, text.shape[1])].set(tokens, mode="drop")
    running = jnp.where(wanted, new & (left > 0), rows.running)
    return dataclasses.replace(rows, left=left, running=running, history=rows.history.add(tokens, new), text=text), out
