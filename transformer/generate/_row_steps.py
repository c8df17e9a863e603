"""The steps of rows in slots: sample a token in each row, propose more, and verify them in one call of the model.

The tokens of a row do not depend on the other slots, or on how its steps are divided among calls: the proposals
of a row depend only on its own text, and every step reads the same number of tokens per row.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer.generate._decoding import decode_chunk, decode_step
from transformer.generate._layers import Params
from transformer.generate._loop import DecodeResult, Drawn, Slots, Stepper, with_step
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
from transformer.generate._speculative import NO_PROPOSER, Proposer, next_memory
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
    params: Params,
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
    draft_params: Params | None = None,
) -> tuple[Rows, Steps]:
    """Make at most `limit` steps, each of which generates 1 to `proposer.tokens` + 1 tokens in each running row.

    The model has unstacked layers, and the pages in `table` have room for all tokens of this call.

    Args:
        keep: rows that continue; the others are ended without a token.
        known: (R, MOST_STEPS), tokens that a row which is computed again has generated already; -1: none.
        masks: the tokens that are allowed in each step of this call; a row with a constraint may generate only one
            token that is not known.
        suppressed: ids that are never chosen.
        limit: maximum number of steps, at most `MOST_STEPS`.
        until_free: return as soon as a row has ended.
    """
    start, width = rows.running & keep, proposer.tokens + 1

    def unfinished(slots):
        has_room = (slots.result.counts <= MOST_STEPS - width).all()  # for all tokens of a step in the output
        is_free = until_free & (start & ~slots.running).any()
        return (slots.result.steps.max() < limit) & has_room & slots.running.any() & ~is_free

    of_call = {"rows": rows, "table": table, "masks": masks, "suppressed": suppressed, "known": known}
    stepper = RowStepper(model, params, None, rows.ends, rows.left, None, proposer, draft_params, **of_call)
    memory = rows.text if proposer.draft is None else rows.draft_pools
    last = jnp.zeros_like(rows.left)
    slots = Slots(last, start, rows.keys, rows.pools, _no_steps(rows), rows.history, memory, rows.logits)
    slots = stepper.run(slots, unfinished)
    out = slots.result
    changed = {"text": slots.memory} if proposer.draft is None else {"draft_pools": slots.memory}
    changed |= {"left": rows.left - out.counts, "lengths": rows.lengths + out.counts, "pools": slots.cache}
    changed |= {"logits": slots.logits, "running": slots.running, "history": slots.history}
    rows = dataclasses.replace(rows, **changed)
    return stored(rows), whole(out)


@dataclass(frozen=True, kw_only=True)
class RowStepper(Stepper):
    """The step of rows whose keys and values are in pages; the `cache` of the slots is the pools of all layers.

    Proposals are verified one after the other, since the penalties of a row depend on the tokens before. A sample is a
    function of logits, settings, and of a key for row and position. So the accepted tokens are those of steps without
    proposals, for every sampling method.
    """

    rows: Rows
    """the rows before the first step"""
    table: Int[Array, "R M"]
    """(R, M), pages of each row"""
    masks: RowMasks
    suppressed: Int[Array, " S"]
    known: Int[Array, "R n"]
    """(R, MOST_STEPS), tokens that are taken instead of sampled ones; -1: none"""

    def draw(self, slots: Slots, logits: Float[Array, "R 1 V"], positions: Int[Array, "R 1"]) -> Drawn:
        """Take the next token of each row: one that is known, or a sample from its logits."""
        keys = jax.vmap(jax.random.fold_in)(slots.keys, positions[:, 0])
        logits = logits[:, 0].astype(jnp.float32)
        tokens = choose_in_rows(logits, keys, self.rows.sampling, slots.history, self.masks, self.suppressed)
        counts = jnp.minimum(slots.result.counts, self.known.shape[1] - 1)[:, None]
        again = jnp.take_along_axis(self.known, counts, axis=1)[:, 0]
        tokens = jnp.where(again >= 0, again, tokens)
        return tokens[:, None], slots.history.add(tokens, slots.running & (tokens >= 0))

    def advance(self, slots: Slots) -> Slots:
        """Generate one token in each running row, and those of the proposals after it that the model samples too."""
        lengths = self.rows.lengths + slots.result.counts  # tokens in the pages
        slots = self.sample(with_step(slots), slots.logits, lengths)
        counts = self._most_proposals(slots)
        tokens = jnp.where(slots.running, slots.tokens, 0)[:, None]
        if self.proposer.tokens:
            # A draft samples with the settings and with the noise of the model at the same position. It does not see
            # constraints, whose rows propose nothing, nor known tokens: proposals depend on the text of the row alone.
            masks, known = RowMasks.blank(*slots.logits.shape), jnp.full_like(self.known, -1)
            tokens, memory = dataclasses.replace(self, masks=masks, known=known)._propose(slots, lengths)
            slots = dataclasses.replace(slots, memory=memory)
            counts = counts if self.proposer.draft else jnp.where(tokens[:, 1] >= 0, counts, 0)
        # A row that does not run stores nothing: its pages may belong to another row by now.
        cache = row_cache(self.model, slots.cache, self.table, lengths, jnp.where(slots.running, 1 + counts, 0))
        if self.proposer.tokens:
            logits, cache = decode_chunk(self.model, self.params, jnp.maximum(tokens, 0), cache)  # (R, Z + 1, V)
        else:
            logits, cache = decode_step(self.model, self.params, tokens[:, 0], cache, None)
            logits = logits[:, None]
        logits = logits.astype(jnp.float32)
        slots = dataclasses.replace(slots, logits=logits[:, 0], cache=pools_of(cache))
        return self._verified(slots, tokens[:, 1:], counts, logits, lengths + 1) if self.proposer.tokens else slots

    def _most_proposals(self, slots: Slots) -> Int[Array, " R"]:
        """Return how many tokens each row may propose: one fewer than it may generate; none with a constraint."""
        most = jnp.clip(self.limit - slots.result.counts - 1, 0, self.proposer.tokens)
        return jnp.where(slots.running & self.rows.proposes, most, 0)

    def _read_draft(
        self, slots: Slots, tokens: Int[Array, " R"], memory: Leaf, lengths: Int[Array, " R"], i: Int[Array, ""]
    ) -> tuple[Float[Array, "R 1 V"], Leaf]:
        # The last proposal is read too, in case it is accepted: the caches of both models contain the same tokens.
        most = self._most_proposals(slots)
        live = slots.running & (most > 0) & (i <= most)
        cache = row_cache(self.proposer.draft, memory, self.table, lengths + i, live.astype(jnp.int32))
        tokens = jnp.where(live, jnp.maximum(tokens, 0), 0)
        logits, cache = decode_step(self.proposer.draft, self.draft_params, tokens, cache, None)
        return logits[:, None], pools_of(cache)

    def _verified(
        self,
        slots: Slots,
        proposals: Int[Array, "R Z"],
        counts: Int[Array, " R"],
        logits: Float[Array, "R T V"],
        lengths: Int[Array, " R"],
    ) -> Slots:
        """Accept the first `counts` (R,) proposals of each row, up to one that is not the token which the row samples.

        `logits` are those after the token before the proposals, and after each proposal; T is Z + 1. There are
        `lengths` (R,) tokens before the proposals.
        """

        def unfinished(carry):
            i, live, _ = carry
            return (i < proposals.shape[1]) & live.any()

        def verify(carry):
            i, live, slots = carry
            places = (lengths + i)[:, None]
            tokens, _ = self.draw(slots, slots.logits[:, None], places)
            right = live & (i < counts) & (tokens[:, 0] == proposals[:, i]) & (tokens[:, 0] >= 0)
            slots = dataclasses.replace(
                slots,
                history=slots.history.add(tokens[:, 0], right),
                memory=next_memory(slots.memory, lengths + i, tokens, places),
            )
            slots = self._record(slots, tokens, right.astype(jnp.int32), places, slots.logits)
            live = right & slots.running
            result = dataclasses.replace(slots.result, accepted=slots.result.accepted + right)
            following = jnp.where(live[:, None], logits[:, i + 1], slots.logits)
            return i + 1, live, dataclasses.replace(slots, logits=following, result=result)

        result = dataclasses.replace(slots.result, proposed=slots.result.proposed + counts)
        start = jnp.int32(0), slots.running & (counts > 0), dataclasses.replace(slots, result=result)
        return jax.lax.while_loop(unfinished, verify, start)[2]

    def _record(
        self,
        slots: Slots,
        tokens: Int[Array, "R 1"],
        most: Int[Array, " R"],
        positions: Int[Array, "R 1"],
        logits: Float[Array, "R V"] | None = None,
    ) -> Slots:
        """Record a token of each row, and the most probable tokens of the rows that want them."""
        before, slots = slots.result.counts, super()._record(slots, tokens, most, positions, logits)
        result = slots.result
        new, shape = result.counts > before, result.top_tokens.shape[::2]

        def top():
            values, ids = jax.lax.top_k(jax.nn.log_softmax(logits, -1), shape[1])
            return ids.astype(jnp.int32), values

        def none():
            return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

        ids, values = jax.lax.cond((self.rows.sampling.top & new).any(), top, none)
        # Past the end, mode="drop" ignores the other rows.
        rows, columns = jnp.arange(shape[0]), jnp.where(new, before, MOST_STEPS)
        result = dataclasses.replace(
            result,
            top_tokens=result.top_tokens.at[rows, columns].set(ids, mode="drop"),
            top_log_probabilities=result.top_log_probabilities.at[rows, columns].set(values, mode="drop"),
        )
        return dataclasses.replace(slots, result=result)


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
