"""Compiled beam search: pure functions of model, parameters and arrays.

Each row has Z live hypotheses, the ones that are extended. A beam index is a number below Z that selects one of them.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from transformer.generate._decoding import Batch, decode_hypotheses, prefill
from transformer.generate._layers import Params, decoding_params, unstack_layers, unstacked_model, uses_unstacked_layers
from transformer.generate._rules import RuleParams, ban_repeated_ngrams, extended, penalize_repeated
from transformer.nn._axes import Array, Bool, Float, Int, Leaf
from transformer.nn._caches import lengthen_cache
from transformer.nn._masks import Mask
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._seq2seq import Seq2Seq

IMPOSSIBLE = -jnp.inf
"""log-probability of an impossible continuation or an unused entry"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BeamParams:
    """The settings of a `Beam`, the end tokens and the length limits as arguments of a compiled search."""

    end_ids: Leaf
    """(E,), ids that end a row"""
    suppressed: Leaf
    """(S,), ids that are never chosen"""
    limits: Leaf
    """(B,), maximum number of new tokens, including the end token"""
    alpha: Leaf
    """(), exponent of the length penalty"""
    norm: Leaf
    """(2,), a and b of the length penalty ((a + length) / b)^alpha"""
    rules: RuleParams
    """rules for the texts"""
    size: int = field(metadata={"static": True})
    """Z, the beam size"""
    n_best: int | None = field(metadata={"static": True})
    """a row stops when no live hypothesis can beat the n_best-th finished one; None: when `size` have ended"""
    estimated: bool = field(metadata={"static": True})
    """whether a live hypothesis is compared by its present score, rather than by the best that it can reach"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BeamState:
    """Live and finished hypotheses of a search. S is the maximum number of steps."""

    tokens: Leaf
    """(S, B, Z), the last token of each live hypothesis after each step"""
    parents: Leaf
    """(S, B, Z), the beam index of its parent, the hypothesis that it extends, one step before"""
    live: Leaf
    """(B, Z), log-probabilities of the live hypotheses, in descending order; -inf: unused"""
    steps_taken: Leaf
    """(B,), number of steps until the row stopped"""
    scores: Leaf
    """(B, Z), scores of the finished hypotheses, in descending order; -inf: unused"""
    totals: Leaf
    """(B, Z), log-probabilities of the finished hypotheses"""
    steps: Leaf
    """(B, Z), number of tokens of the finished hypotheses, without the end token"""
    beam_indices: Leaf
    """(B, Z), beam index of the finished hypotheses after their last token"""
    failed_at: Leaf
    """(B,), position with non-finite logits, or -1; the search stops for all rows at the first such position"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Search:
    """The state of a search between two steps."""

    found: BeamState
    step: Leaf
    """(), number of completed steps"""
    running: Leaf
    """(B,), whether the row is still searched"""
    visible: Leaf
    """(B, Z, C), which of the C cache slots hold the tokens of each hypothesis that was live one step before"""
    cache: Leaf
    """KV cache with each row's prompt, then Z tokens for each step, including those of dropped hypotheses"""
    texts: Leaf | None
    """(B, Z, L), prompt and new tokens of each live hypothesis; None: no rule reads them"""

    def unfinished(self) -> Bool[Array, ""]:
        """Return whether another step is needed."""
        return self.running.any() & (self.found.failed_at < 0).all()


def length_penalty(length: Float[Array, "..."], beam_params: BeamParams) -> Float[Array, "..."]:
    """Return ((a + length) / b)^alpha (Wu et al. 2016, arXiv 1609.08144, equation 14, with a = 5 and b = 6)."""
    return ((beam_params.norm[0] + length) / beam_params.norm[1]) ** beam_params.alpha


def search(
    model: CausalLM | Seq2Seq,
    params: Params,
    prompts: Batch,
    source: Batch | None,
    beam_params: BeamParams,
    new_slots: int,
) -> BeamState:
    """Run a search with up to `new_slots` new tokens per row.

    Each step reads the whole cache, including its empty slots, so a short cache is faster. Few targets are longer than
    twice their source: the search starts with a cache for that length, and continues with the maximum length only if
    some rows have not ended.
    """
    slots = prompts.tokens.shape[1]
    # A step fills Z slots per row, so n new tokens need Z n slots after the prompt.
    first = new_slots if source is None else min(new_slots, 2 * source.tokens.shape[1])
    short, long = (slots + beam_params.size * count for count in (first, new_slots))
    given = source, prompts.lengths, beam_params
    state = start_search(model, params, prompts, source, beam_params, cache_slots=short, new_slots=new_slots)
    state = continue_search(model, params, state, *given, cache_slots=short)
    if short < long and state.unfinished():
        state = continue_search(model, params, state, *given, cache_slots=long)
    return state.found


@functools.partial(jax.jit, static_argnames=("model", "cache_slots", "new_slots"))
def start_search(
    model: CausalLM | Seq2Seq,
    params: Params,
    prompts: Batch,
    source: Batch | None,
    beam_params: BeamParams,
    *,
    cache_slots: int,
    new_slots: int,
) -> Search:
    """Prefill each row once, and choose the first token of its hypotheses. Compiled once per model and shape."""
    logits, cache = prefill(model, params, prompts, source, cache_slots)
    if uses_unstacked_layers(model, params):
        cache = unstack_layers(model, cache)
    (batch, slots), size = prompts.tokens.shape, beam_params.size
    none = jnp.full((batch, size), IMPOSSIBLE, jnp.float32)
    zeros = jnp.zeros((batch, size), jnp.int32)
    found = BeamState(
        tokens=jnp.zeros((new_slots, batch, size), jnp.int32),
        parents=jnp.zeros((new_slots, batch, size), jnp.int32),
        live=none.at[:, 0].set(0.0),  # at first one hypothesis per row: the prompt
        steps_taken=jnp.zeros((batch,), jnp.int32),
        scores=none,
        totals=none,
        steps=zeros,
        beam_indices=zeros,
        failed_at=jnp.full((batch,), -1, jnp.int32),
    )
    # All Z hypotheses get the same logits, but only the first has a finite log-probability, so the first step chooses Z
    # different tokens and not Z copies of the best one.
    logits, step = jnp.broadcast_to(logits[:, None], (batch, size, logits.shape[1])), jnp.int32(0)
    texts = None
    if beam_params.rules.reads_targets:
        room = ((0, 0), (0, new_slots))
        texts = jnp.broadcast_to(jnp.pad(prompts.tokens, room)[:, None], (batch, size, slots + new_slots))
    running = jnp.ones((batch,), bool)
    found, running = choose(found, running, logits, step, prompts.lengths, beam_params, texts)
    # Every hypothesis sees the slots of its row's prompt, but not its padding.
    prompt = jnp.arange(cache_slots)[None, None, :] < prompts.lengths[:, None, None]
    return Search(found, step + 1, running, jnp.broadcast_to(prompt, (batch, size, cache_slots)), cache, texts)


@functools.partial(jax.jit, static_argnames=("model", "cache_slots"))
def continue_search(
    model: CausalLM | Seq2Seq,
    params: Params,
    state: Search,
    source: Batch | None,
    lengths: Int[Array, " B"],
    beam_params: BeamParams,
    *,
    cache_slots: int,
) -> Search:
    """Search until every row has stopped or the cache is full. Compiled once per model and shape."""
    # The usual implementation keeps Z caches per row and reorders them at every step. Here the Z hypotheses of a row
    # share one cache: they are Z queries of one sequence, each step fills Z slots, and a mask lets each hypothesis see
    # only the slots of its own tokens. So nothing is copied when hypotheses are dropped or forked, and the keys and
    # values of the prompt and of cross-attention are stored once.
    if uses_unstacked_layers(model, params):
        params = decoding_params(model, params)
        model = unstacked_model(model)
    room = cache_slots - state.visible.shape[-1]
    state = dataclasses.replace(
        state, visible=jnp.pad(state.visible, ((0, 0), (0, 0), (0, room))), cache=lengthen_cache(state.cache, room)
    )
    size, slots, first = beam_params.size, jnp.arange(cache_slots)[None, :], lengths[:, None]
    # Position in the text of the token in each slot, (B, C): the prompt has one slot per position, then each step has
    # Z.
    slot_positions = jnp.where(slots < first, slots, first + (slots - first) // size)

    def advance(now):
        # Read the tokens that the previous step chose, (B, Z), into the slots first + (step - 1) Z + (0 ... Z - 1).
        tokens, parents = now.found.tokens[now.step - 1], now.found.parents[now.step - 1]
        own = (first + (now.step - 1) * size + jnp.arange(size)[None, :])[:, :, None] == slots[None]
        # A hypothesis sees the slots of its parent and the slot of its new token, (B, Z, C).
        visible = jnp.take_along_axis(now.visible, parents[:, :, None], axis=1) | own
        positions = jnp.broadcast_to(first + now.step - 1, tokens.shape)
        # The token positions, not the slots, determine causality, windows and relative biases.
        mask = Mask.array(visible[:, None]) & Mask.places(positions, slot_positions)
        logits, cache = decode_hypotheses(model, params, tokens, now.cache, source, positions, mask)
        places = lengths + now.step
        texts = None if now.texts is None else extended(now.texts, parents, tokens, places - 1)
        found, running = choose(now.found, now.running, logits, now.step, places, beam_params, texts)
        return Search(found, now.step + 1, running, visible, cache, texts)

    # The last step whose tokens still fit in the cache of every row.
    last = (cache_slots - lengths.max()) // size
    return jax.lax.while_loop(lambda now: now.unfinished() & (now.step <= last), advance, state)


def choose(
    found: BeamState,
    running: Bool[Array, " B"],
    logits: Float[Array, "B Z V"],
    step: Int[Array, ""],
    positions: Int[Array, " B"],
    beam_params: BeamParams,
    texts: Int[Array, "B Z L"] | None = None,
) -> tuple[BeamState, Bool[Array, " B"]]:
    """Choose the next token of the hypotheses of each row after `step` steps, and return them and which rows continue.

    Rows that do not run keep their hypotheses. `positions` (B,) are those of the tokens to choose, and `texts` the
    tokens of the live hypotheses, if a rule reads them.
    """
    batch, size, vocab_size = logits.shape
    ends, rows = beam_params.end_ids, jnp.arange(batch)[:, None]
    # log P(token) = logit - logsumexp(logits). The normalizer, (B, Z), is computed before tokens are suppressed, so the
    # probabilities of the other tokens do not change.
    norms = jax.nn.logsumexp(logits, -1)
    # A non-finite normalizer of a live hypothesis means NaN or infinity among its logits.
    failed = running & ((found.live > IMPOSSIBLE) & ~jnp.isfinite(norms)).any(-1)
    if beam_params.suppressed.size:
        logits = logits.at[:, :, beam_params.suppressed].set(IMPOSSIBLE)
    if ends.size > 1:  # several end tokens: one continuation whose probability is their sum
        together = jax.nn.logsumexp(logits[:, :, ends], -1)
        logits = logits.at[:, :, ends].set(IMPOSSIBLE).at[:, :, ends[0]].set(together)
    logits = ruled(logits, norms, texts, positions, step, beam_params)

    # The best 2 Z continuations of a row are enough: each hypothesis has only one that ends, so at most Z of the 2 Z
    # end, and at least Z are left to extend. A top-k per hypothesis first leaves 2 Z^2 candidates of the Z V per row.
    each = min(2 * size, vocab_size)
    top, tokens = top_k(logits, each)  # (B, Z, 2 Z); for ties the lower id first
    # log P(Y, token) = log P(Y) + logit - logsumexp, (B, Z 2 Z)
    totals = (top + (found.live - norms)[:, :, None]).reshape(batch, size * each)
    totals, picked = jax.lax.top_k(totals, min(2 * size, size * each))
    # An index into Z * each candidates: the hypothesis is index // each, and the token is looked up. Both (B, 2 Z).
    tokens, parents = tokens.reshape(batch, size * each)[rows, picked], picked // each
    ending = tokens == ends[0] if ends.size else jnp.zeros(tokens.shape, bool)

    # Finished: continuations that end and are among the first Z, merged with the earlier ones by penalized score. Live:
    # the best Z that don't end, by log-probability. The length counts the end token.
    length = (step + 1).astype(jnp.float32)
    ended = jnp.where(ending, totals, IMPOSSIBLE)[:, :size]
    scores = jnp.concatenate([found.scores, ended / length_penalty(length, beam_params)], 1)
    scores, order = jax.lax.top_k(scores, size)
    live, extended = jax.lax.top_k(jnp.where(ending, IMPOSSIBLE, totals), size)

    # Select the same entries from the other fields of the finished hypotheses. They are concatenated as (old, new), as
    # `scores` is.
    def joined(kept, new):
        return jnp.concatenate([kept, jnp.broadcast_to(new, kept.shape)], 1)[rows, order]

    # Stop early: Z hypotheses have finished, or none is live.
    if beam_params.n_best is None:
        enough = (scores[:, -1] > IMPOSSIBLE) | (live[:, 0] == IMPOSSIBLE)
    else:
        # An upper bound for live hypotheses: further tokens only lower log P, which is negative, and it is largest when
        # divided by the largest penalty, that of the maximum length.
        bound = length if beam_params.estimated else beam_params.limits.astype(jnp.float32)
        enough = live[:, 0] / length_penalty(bound, beam_params) <= scores[:, beam_params.n_best - 1]
    of_rows = {
        "live": live,
        "steps_taken": jnp.full((batch,), step + 1),
        "scores": scores,
        "totals": joined(found.totals, ended),
        "steps": joined(found.steps, step),
        "beam_indices": joined(found.beam_indices, parents[:, :size]),
        "failed_at": jnp.where(failed, positions, -1),
    }
    # Rows that have stopped keep their values.
    for name, new in of_rows.items():
        of_rows[name] = jnp.where(running.reshape(-1, *[1] * (new.ndim - 1)), new, getattr(found, name))
    of_steps = {
        "tokens": found.tokens.at[step].set(tokens[rows, extended]),
        "parents": found.parents.at[step].set(parents[rows, extended]),
    }
    running = running & ~failed & ~enough & (step + 1 < beam_params.limits)
    return dataclasses.replace(found, **of_rows, **of_steps), running


def ruled(
    logits: Float[Array, "B Z V"],
    norms: Float[Array, "B Z"],
    texts: Int[Array, "B Z L"] | None,
    lengths: Int[Array, " B"],
    step: Int[Array, ""],
    beam_params: BeamParams,
) -> Float[Array, "B Z V"]:
    """Return the logits after the rules; minus the normalizers `norms` they are log-probabilities.

    In the given logits, suppressed tokens and end tokens but the first are -inf. `texts` are the targets, of `lengths`
    (B,) tokens; None: no rule reads them.
    """
    rules, ends = beam_params.rules, beam_params.end_ids
    if rules.repetition is not None:
        shift = 0.0 if beam_params.size == 1 else norms[:, :, None]
        logits = penalize_repeated(logits - shift, texts, lengths, rules.repetition) + shift
    if rules.no_repeat_ngram:
        logits = ban_repeated_ngrams(logits, texts, lengths, rules.no_repeat_ngram)
    if ends.size:
        early = step < rules.fewest
        logits = logits.at[:, :, ends[0]].set(jnp.where(early, -jnp.inf, logits[:, :, ends[0]]))
    if ends.size and rules.force_end:
        last = (step + 1 >= beam_params.limits)[:, None]
        ended = jnp.full_like(logits, -jnp.inf).at[:, :, ends[0]].set(norms)
        logits = jnp.where(last[:, :, None], ended, logits)
    return logits


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest values of x (..., V), in descending order, and their indices, both (..., k)."""
    # Values and ties are those of `jax.lax.top_k`. With a large V this takes a third of the time of `jax.lax.top_k`. x
    # is divided into blocks, and only the k blocks with the largest maxima are searched. They contain the k largest
    # values: a value in any other block is at most each of the k block maxima.
    block = next((size for size in range(48, 15, -1) if x.shape[-1] % size == 0), 32)  # prefer one that divides V
    blocks = x.shape[-1] // block
    if blocks <= 4 * k:
        top, ids = jax.lax.top_k(x, k)
        return top, ids
    # Indices of the best k blocks in ascending order, so that ties still go to the lower index.
    maxima = x[..., : blocks * block].reshape(*x.shape[:-1], blocks, block).max(-1)
    highest = jnp.sort(jax.lax.top_k(maxima, k)[1], -1)
    offsets = jax.lax.broadcasted_iota(highest.dtype, (*highest.shape, block), highest.ndim)
    ids = (highest[..., None] * block + offsets).reshape(*highest.shape[:-1], k * block)
    # The values after the last whole block are always candidates.
    rest = jax.lax.broadcasted_iota(ids.dtype, (*ids.shape[:-1], x.shape[-1] % block), ids.ndim - 1) + blocks * block
    ids = jnp.concatenate([ids, rest], -1)
    top, picked = jax.lax.top_k(jnp.take_along_axis(x, ids, -1, mode="promise_in_bounds"), k)
    return top, jnp.take_along_axis(ids, picked, -1, mode="promise_in_bounds")
