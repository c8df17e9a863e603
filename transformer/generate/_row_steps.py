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
from transformer.generate._penalties import log_probabilities
from transformer.generate._row_pages import pools_of, row_cache
from transformer.generate._row_proposals import NO_PROPOSER, Proposer, propose
from transformer.generate._rows import MOST_STEPS, MOST_TOP, RowMasks, Rows, choose_in_rows, stored, whole
from transformer.nn._axes import Array, Bool, Float, Int, Leaf
from transformer.nn.models._causal_lm import CausalLM


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steps:
    """The tokens of one call of `advance`; entries from `counts` on are undefined."""

    tokens: Leaf
    """(R, MOST_STEPS)"""
    log_probabilities: Leaf
    """(R, MOST_STEPS), under the model, before penalties, temperature and filters"""
    top_tokens: Leaf
    """(R, MOST_STEPS, A), the A most probable tokens, if the row wants them"""
    top_log_probabilities: Leaf
    """(R, MOST_STEPS, A)"""
    counts: Leaf
    """(R,), number of tokens without an end token"""
    ended: Leaf
    """(R,), whether an end token followed"""
    failed: Leaf
    """(R,), whether logits were not finite"""
    proposed: Leaf
    """(R,), number of tokens that were proposed and verified"""
    accepted: Leaf
    """(R,), number of proposed tokens that the model sampled too"""
    steps: Leaf
    """(), number of decoding steps"""


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
        return (out.steps < limit) & has_room & rows.running.any() & ~(until_free & (start & ~rows.running).any())

    def step(carry):
        rows, out = carry
        tokens = draw(rows, out, masks)
        rows, out = _recorded(rows, out, tokens, rows.running)
        rows, proposals, counts = propose(proposer, draft_params, rows, table, tokens, suppressed)
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
        out = dataclasses.replace(out, steps=out.steps + 1, proposed=out.proposed + counts)
        return _verified(rows, out, proposals, counts, logits, functools.partial(draw, masks=masks.unconstrained()))

    rows, out = jax.lax.while_loop(unfinished, step, (rows, _no_steps(rows)))
    return stored(rows), whole(out)


def _draw(known: Int[Array, "R n"], suppressed: Int[Array, " S"], rows: Rows, out: Steps, masks: RowMasks):
    """Return the next token of each row, (R,): one that is known, or a sample from its logits."""
    keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.lengths)
    tokens = choose_in_rows(rows.logits, keys, rows.sampling, rows.history, masks, suppressed)
    again = jnp.take_along_axis(known, jnp.minimum(out.counts, known.shape[1] - 1)[:, None], axis=1)[:, 0]
    return jnp.where(again >= 0, again, tokens)


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
    most = min(MOST_TOP, vocab_size)
    return Steps(
        tokens=jnp.zeros((slots, MOST_STEPS), jnp.int32),
        log_probabilities=jnp.zeros((slots, MOST_STEPS), jnp.float32),
        top_tokens=jnp.zeros((slots, MOST_STEPS, most), jnp.int32),
        top_log_probabilities=jnp.zeros((slots, MOST_STEPS, most), jnp.float32),
        counts=jnp.zeros((slots,), jnp.int32),
        ended=jnp.zeros((slots,), bool),
        failed=jnp.zeros((slots,), bool),
        proposed=jnp.zeros((slots,), jnp.int32),
        accepted=jnp.zeros((slots,), jnp.int32),
        steps=jnp.int32(0),
    )


def _recorded(rows: Rows, out: Steps, tokens: Int[Array, " R"], wanted: Bool[Array, " R"]) -> tuple[Rows, Steps]:
    """Append a token, whose logits are `rows.logits`, to each row of `wanted` (R,), unless it ends the row."""
    failed = wanted & (tokens < 0)
    ended = wanted & (tokens[:, None] == rows.ends).any(1) & ~failed
    new = wanted & ~failed & ~ended
    slots, most = jnp.arange(tokens.shape[0]), out.top_tokens.shape[-1]
    columns = jnp.where(new, out.counts, MOST_STEPS)  # past the end: mode="drop" ignores the other rows

    def top():
        values, ids = jax.lax.top_k(jax.nn.log_softmax(rows.logits, -1), most)
        return ids.astype(jnp.int32), values

    def none():
        return jnp.zeros((len(tokens), most), jnp.int32), jnp.zeros((len(tokens), most), jnp.float32)

    ids, values = jax.lax.cond((rows.sampling.top & new).any(), top, none)

    def put(whole, part):
        return whole.at[slots, columns].set(part, mode="drop")

    out = dataclasses.replace(
        out,
        tokens=put(out.tokens, tokens),
        log_probabilities=put(out.log_probabilities, log_probabilities(rows.logits, tokens)),
        top_tokens=put(out.top_tokens, ids),
        top_log_probabilities=put(out.top_log_probabilities, values),
        counts=out.counts + new,
        ended=out.ended | ended,
        failed=out.failed | failed,
    )
    left, text = rows.left - new, rows.text
    if text is not None:
        text = text.at[slots, jnp.where(new, rows.lengths, text.shape[1])].set(tokens, mode="drop")
    running = jnp.where(wanted, new & (left > 0), rows.running)
    return dataclasses.replace(rows, left=left, running=running, history=rows.history.add(tokens, new), text=text), out
