"""The decoding loop: slots, each with one row, whose last token a step reads and whose next tokens it samples.

Generation, continuous batching, speculative decoding, streams and transcripts are made of these steps. They differ in
what samples a token, in what proposes tokens, and in when the host takes over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import jax.numpy as jnp

from transformer.generate._constraints import only_allowed
from transformer.generate._decoding import Batch, decode_chunk, decode_step, prefill, with_unstacked_layers
from transformer.generate._layers import Cache, Params
from transformer.generate._lookup import looked_up
from transformer.generate._penalties import History, log_probabilities
from transformer.generate._sampling import SamplerParams, choose
from transformer.generate._speculative import NO_PROPOSER, Proposer, first_memory, next_memory
from transformer.nn._axes import Array, Bool, Float, Int, Leaf, PRNGKey
from transformer.nn._caches import cache_length, set_cache_length
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._seq2seq import Seq2Seq


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeResult:
    """The tokens that a decoding loop generated."""

    tokens: Leaf
    """(B, N), new tokens, then the end token of a row that has ended; later entries are undefined"""
    counts: Leaf
    """(B,), number of new tokens per row, without the end token"""
    ended: Leaf
    """(B,), whether the row has ended with an end token"""
    failed_at: Leaf
    """(B,), position with non-finite logits, or -1; a loop stops for all rows at the first such position"""
    steps: Leaf
    """(B,), number of steps that the row took part in, after its prompt was read"""
    log_probabilities: Leaf | None = None
    """(B, N), of the tokens under the model, before penalties, temperature and filters; None: not computed"""

    @staticmethod
    def blank(batch: int, new_slots: int, *, scored: bool = False) -> DecodeResult:
        """Return a result without tokens."""
        return DecodeResult(
            tokens=jnp.zeros((batch, new_slots), jnp.int32),
            counts=jnp.zeros((batch,), jnp.int32),
            ended=jnp.zeros((batch,), bool),
            failed_at=jnp.full((batch,), -1, jnp.int32),
            steps=jnp.zeros((batch,), jnp.int32),
            log_probabilities=jnp.zeros((batch, new_slots), jnp.float32) if scored else None,
        )

    @property
    def failed(self) -> Leaf:
        """Whether the logits of the row were not finite, (B,)."""
        return self.failed_at >= 0

    @property
    def stopped(self) -> Leaf:
        """Whether the row has ended or failed, (B,)."""
        return self.ended | self.failed

    def add(
        self,
        tokens: Int[Array, "B Z"],
        most: Int[Array, " B"],
        ends: Int[Array, " E"] | Int[Array, "B E"],
        positions: Int[Array, "B Z"],
        logits: Float[Array, "B V"] | None = None,
    ) -> DecodeResult:
        """Record at most `most` of the sampled tokens of each row, up to the first one that ends it.

        Args:
            tokens: (B, Z); a negative token marks logits that were not finite, which end the row at its position.
            most: (B,), 0 for rows that have stopped.
            ends: (E,), or (B, E) for each row, tokens that end a row; -1: none.
            positions: (B, Z), of the tokens.
            logits: (B, V), from which a single token per row was sampled, if log-probabilities are recorded.
        """
        num, failed = tokens.shape[1], tokens < 0
        stops = failed | (tokens[..., None] == jnp.atleast_2d(ends)[:, None]).any(-1)
        # Index of the first token that stops the row, or Z if there is none.
        first = jnp.where(stops.any(1), jnp.argmax(stops, 1), num)
        stopped, taken = first < most, jnp.minimum(most, first)
        last = jnp.minimum(first, num - 1)
        fails = stopped & _of_rows(failed, last)
        index = jnp.arange(self.tokens.shape[1])[None, :] - self.counts[:, None]  # (B, N), of the token for each entry
        new = (index >= 0) & (index < (taken + stopped)[:, None])
        values = tokens if num == 1 else jnp.take_along_axis(tokens, jnp.clip(index, 0, num - 1), axis=1)
        scores = self.log_probabilities
        if scores is not None:
            scores = jnp.where(new, log_probabilities(logits, tokens[:, 0])[:, None], scores)
        return dataclasses.replace(
            self,
            tokens=jnp.where(new, values, self.tokens),
            counts=self.counts + taken,
            ended=self.ended | (stopped & ~fails),
            failed_at=jnp.where(fails, _of_rows(positions, last), self.failed_at),
            log_probabilities=scores,
        )


def _of_rows(array: Array, index: Int[Array, " B"]) -> Array:
    """Return array[b, index[b]], (B,), of an array (B, Z); without a gather if Z = 1."""
    return array[:, 0] if array.shape[1] == 1 else jnp.take_along_axis(array, index[:, None], axis=1)[:, 0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The state of B slots, each with one row; a slot whose row does not run is free."""

    tokens: Leaf
    """(B,), the last token of each row, not yet in the cache"""
    running: Leaf
    """(B,), whether the slot's row still generates tokens"""
    keys: PRNGKey
    """(B,), random key of each row; (): one that `draw` uses for all rows"""
    cache: Leaf
    """KV cache"""
    result: DecodeResult
    """tokens generated so far"""
    history: Leaf | None = None
    """what sampling depends on besides the logits, such as a `History`; None: nothing"""
    memory: Leaf | None = None
    """what proposals come from (`_speculative.py`); None: nothing"""
    logits: Leaf | None = None
    """(B, V), for the next tokens, if all tokens are in the cache; None: the last ones are not"""

    @staticmethod
    def started(
        keys: PRNGKey,
        cache: Cache,
        result: DecodeResult,
        history: Leaf | None = None,
        memory: Leaf | None = None,
        logits: Leaf | None = None,
    ) -> Slots:
        """Return slots whose rows all run, before their first tokens are sampled."""
        tokens, running = jnp.zeros(result.counts.shape, jnp.int32), jnp.ones(result.counts.shape, bool)
        return Slots(tokens, running, keys, cache, result, history, memory, logits)

    def unfinished(self) -> Bool[Array, ""]:
        """Return whether a row runs and none has failed."""
        return self.running.any() & ~self.result.failed.any()


Drawn: TypeAlias = tuple[Int[Array, "B Z"], Leaf | None]
"""tokens (B, Z), and the new history"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stepper:
    """One step of the decoding loop: read the last tokens, sample the next ones, and record them.

    Slots that have logits are sampled first, and the new tokens are read then: their loop can be interrupted. A
    subclass can sample in another way.
    """

    model: CausalLM | Seq2Seq = field(metadata={"static": True})
    params: Leaf
    """parameters of the model"""
    choice: SamplerParams | None
    """how `draw` samples"""
    ends: Leaf
    """(E,), or (B, E) for each row, ids that end a row; -1: none"""
    limit: Leaf
    """(), or (B,), maximum number of new tokens per row"""
    source: Batch | None = None
    """sources of a Seq2Seq, of which only the lengths are used"""
    proposer: Proposer = field(default=NO_PROPOSER, metadata={"static": True})
    draft_params: Leaf | None = None
    """parameters of the proposer's model"""
    allowed: Leaf | None = None
    """bits of the tokens that may be sampled (`only_allowed`); None: all"""

    def draw(self, slots: Slots, logits: Float[Array, "B Z V"], positions: Int[Array, "B Z"]) -> Drawn:
        """Sample tokens (B, Z) at these positions, with the key of each row folded with the position."""
        # So a sample depends neither on the other rows nor on the number of steps, and a draft samples with the noise
        # of the model at the same position.
        fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
        keys, logits = fold(slots.keys, positions).reshape(-1), logits.reshape(-1, logits.shape[-1])
        logits = logits if self.allowed is None else only_allowed(logits, self.allowed)
        tokens = choose(logits, keys, self.choice, slots.history).reshape(positions.shape)
        # The history of a row that this token ends is not used any more.
        return tokens, None if slots.history is None else slots.history.add(tokens[:, 0], slots.running)

    def run(self, slots: Slots, unfinished: Callable[[Slots], Bool[Array, ""]] = Slots.unfinished) -> Slots:
        """Make steps as long as `unfinished` holds."""
        return jax.lax.while_loop(unfinished, self.advance, slots)

    def start(
        self,
        keys: PRNGKey,
        cache: Cache,
        logits: Float[Array, "B V"],
        new_slots: int,
        history: Leaf | None = None,
        memory: Leaf | None = None,
    ) -> Slots:
        """Return slots whose rows all run, with the first tokens, from the logits after the prompts in the cache."""
        blank = DecodeResult.blank(logits.shape[0], new_slots)
        return self.sample(Slots.started(keys, cache, blank, history, memory), logits, cache_length(cache))

    def advance(self, slots: Slots) -> Slots:
        """Generate one token in each running row; with proposals, also those of them that the model samples too."""
        slots = with_step(slots)
        if self.proposer.tokens:
            return self._verify_proposals(slots)
        if slots.logits is None:
            slots, logits = self._read(slots)
            return self.sample(slots, logits, cache_length(slots.cache))
        slots, logits = self._read(self.sample(slots, slots.logits, cache_length(slots.cache)))
        return dataclasses.replace(slots, logits=logits)

    def _read(self, slots: Slots) -> tuple[Slots, Float[Array, "B V"]]:
        """Read the last tokens, and return the logits (B, V) after them."""
        # All rows take part in each step, since shapes are fixed. The tokens of ended rows are not counted; the -1 of a
        # failed row is replaced by a valid id.
        tokens = jnp.maximum(slots.tokens, 0)
        logits, cache = decode_step(self.model, self.params, tokens, slots.cache, self.source)
        return dataclasses.replace(slots, cache=cache), logits

    def sample(self, slots: Slots, logits: Float[Array, "B V"], positions: Int[Array, " B"]) -> Slots:
        """Sample the tokens at `positions` (B,), which follow the tokens in the cache, and record them."""
        places = positions[:, None]
        tokens, history = self.draw(slots, logits[:, None], places)
        slots = dataclasses.replace(slots, history=history)
        if self.proposer.tokens:
            slots = dataclasses.replace(slots, memory=next_memory(slots.memory, positions, tokens, places))
        return self._record(slots, tokens, jnp.ones_like(positions), places, logits)

    def _verify_proposals(self, slots: Slots) -> Slots:
        """Verify proposals in one call of the model, and record the accepted ones and one more token."""
        before, num = cache_length(slots.cache), self.proposer.tokens  # (B,)
        tokens, memory = self._propose(slots, before)
        logits, cache = decode_chunk(self.model, self.params, jnp.maximum(tokens, 0), slots.cache)
        # The logits after input token i predict the token at position before + 1 + i, (B, Z + 1).
        positions = before[:, None] + 1 + jnp.arange(num + 1)[None, :]
        drawn, _ = self.draw(slots, logits, positions)  # the tokens that the model samples, (B, Z + 1)
        # Accept proposals up to the first one that differs: cumprod of matches is 1 until then, so its sum counts them.
        # The model's own token after the last accepted proposal is valid too, whether or not a proposal was rejected.
        accepted = jnp.cumprod(drawn[:, :-1] == tokens[:, 1:], axis=1).sum(1)
        new = self._record(slots, drawn, accepted + 1, positions)
        # The cache keeps the previous last token and the accepted proposals; the next step reads the new last token.
        lengths = jnp.where(new.running, before + accepted + 1, before)
        return dataclasses.replace(
            new,
            tokens=jnp.where(new.running, new.tokens, slots.tokens),
            cache=set_cache_length(cache, lengths),
            memory=next_memory(memory, lengths, drawn, positions),
        )

    def _propose(self, slots: Slots, lengths: Int[Array, " B"]) -> tuple[Int[Array, "B Z"], Leaf]:
        """Propose the tokens after the last ones of rows with `lengths` (B,) tokens in the cache.

        Return the last token of each row and the proposals, (B, 1 + Z), and the new memory. A proposal of -1, which a
        lookup without a match makes, is never accepted.
        """
        if self.proposer.draft is None:
            found = looked_up(slots.memory, lengths + 1, self.proposer.source)
            return jnp.concatenate([slots.tokens[:, None], found], axis=1), slots.memory

        def one_more(carry, i):
            tokens, history, memory = carry
            logits, memory = self._read_draft(slots, tokens, memory, lengths, i)
            now = dataclasses.replace(slots, history=history)
            tokens, history = self.draw(now, logits, (lengths + 1 + i)[:, None])
            return (tokens[:, 0], history, memory), tokens[:, 0]

        start = slots.tokens, slots.history, slots.memory
        (_, _, memory), found = jax.lax.scan(one_more, start, jnp.arange(self.proposer.tokens + 1))
        # The last step only adds the last proposal to the cache, in case it is accepted; its sample is not used.
        return jnp.concatenate([slots.tokens[:, None], found[:-1].T], axis=1), memory

    def _read_draft(
        self, slots: Slots, tokens: Int[Array, " B"], memory: Leaf, lengths: Int[Array, " B"], i: Int[Array, ""]
    ) -> tuple[Float[Array, "B 1 V"], Leaf]:
        """Let the draft model read token i after the first `lengths` (B,) tokens of each row."""
        return decode_chunk(self.proposer.draft, self.draft_params, jnp.maximum(tokens, 0)[:, None], memory)

    def _record(
        self,
        slots: Slots,
        tokens: Int[Array, "B Z"],
        most: Int[Array, " B"],
        positions: Int[Array, "B Z"],
        logits: Float[Array, "B V"] | None = None,
    ) -> Slots:
        """Record at most `most` (B,) of the sampled tokens of each running row, as far as the limit allows."""
        most = jnp.where(slots.running, jnp.minimum(most, self.limit - slots.result.counts), 0)
        result = slots.result.add(tokens, most, self.ends, positions, logits)
        last = jnp.maximum(result.counts - slots.result.counts - 1, 0)
        return dataclasses.replace(
            slots,
            tokens=_of_rows(tokens, last),
            running=slots.running & ~result.stopped & (result.counts < self.limit),
            result=result,
        )


def with_step(slots: Slots) -> Slots:
    """Return the slots with one more step of each running row."""
    result = dataclasses.replace(slots.result, steps=slots.result.steps + slots.running)
    return dataclasses.replace(slots, result=result)


@functools.partial(jax.jit, static_argnames=("model", "cache_slots", "new_slots", "paged", "proposer"))
def decode(
    model: CausalLM | Seq2Seq,
    params: Params,
    prompts: Batch,
    source: Batch | None,
    keys: PRNGKey,
    choice: SamplerParams,
    eos_ids: Int[Array, " E"],
    limit: Int[Array, ""],
    *,
    cache_slots: int,
    new_slots: int,
    paged: bool = False,
    proposer: Proposer = NO_PROPOSER,
    draft_params: Params | None = None,
) -> DecodeResult:
    """Prefill the prompts, then generate until every row has ended or has `limit` new tokens, at most `new_slots`.

    The token at position p of a row is drawn with `fold_in(key, p)`. With `paged`, keys and values of a `CausalLM` are
    stored in pages. A proposer proposes tokens of a `CausalLM`, which are verified in one call (speculative decoding);
    penalties exclude it.

    Compiled once per model, array shapes, kind of `choice`, and proposer.
    """
    logits, cache = prefill(model, params, prompts, source, cache_slots, paged=paged)
    memory = first_memory(proposer, draft_params, prompts, cache_slots)
    if proposer.draft is not None:
        small, draft_params, memory = with_unstacked_layers(proposer.draft, draft_params, memory)
        proposer = dataclasses.replace(proposer, source=small)
    model, params, cache = with_unstacked_layers(model, params, cache)
    stepper = Stepper(model, params, choice, eos_ids, limit, source, proposer, draft_params)
    history = None  # only penalties need the tokens so far
    if choice.penalties is not None:
        history = History.of(prompts.tokens, prompts.lengths, logits.shape[-1])
    return stepper.run(stepper.start(keys, cache, logits, new_slots, history, memory)).result
