"""The compiled part of beam search: pure functions of model, parameters and arrays. A place is that of one of the Z
hypotheses that are followed for each row, a number below Z.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from transformer.generate._decoding import Batch, decode_side_by_side, prefill
from transformer.generate._layers import keeps_apart, separate, separated
from transformer.nn._axes import Array, Bool, Float, Int, Leaf
from transformer.nn._caches import lengthen_cache
from transformer.nn._masks import Mask
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._seq2seq import Seq2Seq

IMPOSSIBLE = -jnp.inf
"""log-probability of what is not there"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BeamParams:
    """What a compiled search is told of a `Beam` and of the rows' ends and lengths."""

    end_ids: Leaf
    """(E,), ids that end a row"""
    suppressed: Leaf
    """(S,), ids that are never chosen"""
    limits: Leaf
    """(B,), new tokens at most, the end included"""
    alpha: Leaf
    """(), of the length penalty"""
    size: int = field(metadata={"static": True})
    """Z"""
    n_best: int | None = field(metadata={"static": True})
    """a row stops when no hypothesis that is followed can beat the n_best-th; None: when `size` have ended"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BeamState:
    """What a search has found so far."""

    tokens: Leaf
    """(S, B, Z), what each step put behind the hypotheses it chose"""
    parents: Leaf
    """(S, B, Z), the place, a step before, of the hypothesis that each goes on from"""
    live: Leaf
    """(B, Z), log-probabilities of those followed, falling; -inf: there is none"""
    taken: Leaf
    """(B,), steps until a row stopped"""
    scores: Leaf
    """(B, Z), of those that ended, falling; -inf: there is none"""
    totals: Leaf
    """(B, Z), their log-probabilities"""
    steps: Leaf
    """(B, Z), how many tokens each of them has"""
    places: Leaf
    """(B, Z), the place of each after its last token"""
    failed_at: Leaf
    """(B,), position whose logits were not finite, or -1. The search stops at the first, for all rows"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Search:
    """A search under way."""

    found: BeamState
    step: Leaf
    """(), steps done"""
    running: Leaf
    """(B,), whether a row goes on"""
    visible: Leaf
    """(B, Z, C), the slots of the cache that each hypothesis followed a step before has its tokens in"""
    cache: Any
    """of each row's prompt, and then of all Z hypotheses of each step, those no longer followed included"""

    def unfinished(self) -> Bool[Array, ""]:
        """Whether there is something left to do."""
        return self.running.any() & (self.found.failed_at < 0).all()


def length_penalty(length: Float[Array, "..."], alpha: Float[Array, ""]) -> Float[Array, "..."]:
    """((5 + length) / 6)^alpha (Wu et al. 2016, arXiv 1609.08144, equation 14, where 6 is 5 + 1)."""
    return ((5.0 + length) / 6.0) ** alpha


def search(
    model: CausalLM | Seq2Seq,
    params: Any,
    prompts: Batch,
    source: Batch | None,
    terms: BeamParams,
    new_slots: int,
) -> BeamState:
    """The whole search, of up to `new_slots` new tokens a row.

    Every step reads the whole cache, filled or not. Few targets are twice as long as their source: the cache is, at
    first, and as long as it may have to be only for what does not end by then.
    """
    slots = prompts.tokens.shape[1]
    first = new_slots if source is None else min(new_slots, 2 * source.tokens.shape[1])
    begun = begin(model, params, prompts, source, terms, cache_slots=slots + terms.size * first, new_slots=new_slots)
    begun = go_on(model, params, begun, source, prompts.lengths, terms, cache_slots=slots + terms.size * first)
    if first < new_slots and begun.unfinished():
        begun = go_on(model, params, begun, source, prompts.lengths, terms, cache_slots=slots + terms.size * new_slots)
    return begun.found


@functools.partial(jax.jit, static_argnames=("model", "cache_slots", "new_slots"))
def begin(
    model: CausalLM | Seq2Seq,
    params: Any,
    prompts: Batch,
    source: Batch | None,
    terms: BeamParams,
    *,
    cache_slots: int,
    new_slots: int,
) -> Search:
    """Prefill of each row, once, and the first tokens of its hypotheses. Compiled once for each model and shape."""
    logits, cache = prefill(model, params, prompts, source, cache_slots)
    if keeps_apart(model, params):
        cache = separate(model, cache)
    batch, size = prompts.lengths.shape[0], terms.size
    none = jnp.full((batch, size), IMPOSSIBLE, jnp.float32)
    zeros = jnp.zeros((batch, size), jnp.int32)
    found = BeamState(
        tokens=jnp.zeros((new_slots, batch, size), jnp.int32),
        parents=jnp.zeros((new_slots, batch, size), jnp.int32),
        live=none.at[:, 0].set(0.0),  # the prompt alone
        taken=zeros[:, 0],
        scores=none,
        totals=none,
        steps=zeros,
        places=zeros,
        failed_at=zeros[:, 0] - 1,
    )
    logits, step = jnp.broadcast_to(logits[:, None], (batch, size, logits.shape[1])), jnp.int32(0)
    found, running = choose(found, jnp.ones((batch,), bool), logits, step, prompts.lengths, terms)
    prompt = jnp.arange(cache_slots)[None, None, :] < prompts.lengths[:, None, None]
    return Search(found, step + 1, running, jnp.broadcast_to(prompt, (batch, size, cache_slots)), cache)


@functools.partial(jax.jit, static_argnames=("model", "cache_slots"))
def go_on(
    model: CausalLM | Seq2Seq,
    params: Any,
    begun: Search,
    source: Batch | None,
    lengths: Int[Array, " B"],
    terms: BeamParams,
    *,
    cache_slots: int,
) -> Search:
    """One loop until every row has stopped, or a cache of `cache_slots` is full. Compiled once for each model and
    shape.

    Nothing in the cache is moved when hypotheses are dropped or forked. Those of a row are queries side by side of one
    cache, in which each step fills a slot for each; a hypothesis sees the slots that it has come through. So the prompt
    is there once, and so are the keys and values of cross-attention.

    Args:
        begun: with a cache of so many slots, or fewer.
        lengths: (B,), of the prompts.
    """
    if keeps_apart(model, params):
        params = {**params, "decoder": separate(model, params["decoder"])}
        model = separated(model)
    room = cache_slots - begun.visible.shape[-1]
    begun = dataclasses.replace(
        begun, visible=jnp.pad(begun.visible, ((0, 0), (0, 0), (0, room))), cache=lengthen_cache(begun.cache, room)
    )
    size, slots, first = terms.size, jnp.arange(cache_slots)[None, :], lengths[:, None]
    places = jnp.where(slots < first, slots, first + (slots - first) // size)

    def advance(now):
        tokens, parents = now.found.tokens[now.step - 1], now.found.parents[now.step - 1]
        own = (first + (now.step - 1) * size + jnp.arange(size)[None, :])[:, :, None] == slots[None]
        visible = jnp.take_along_axis(now.visible, parents[:, :, None], axis=1) | own
        positions = jnp.broadcast_to(first + now.step - 1, tokens.shape)
        mask = Mask.array(visible[:, None]) & Mask.places(positions, places)
        logits, cache = decode_side_by_side(model, params, tokens, positions, mask, now.cache, source)
        found, running = choose(now.found, now.running, logits, now.step, lengths + now.step, terms)
        return Search(found, now.step + 1, running, visible, cache)

    # So many steps that another token would find no slot.
    last = (cache_slots - lengths.max()) // size
    return jax.lax.while_loop(lambda now: now.unfinished() & (now.step <= last), advance, begun)


def choose(
    found: BeamState,
    running: Bool[Array, " B"],
    logits: Float[Array, "B Z V"],
    step: Int[Array, ""],
    positions: Int[Array, " B"],
    terms: BeamParams,
) -> tuple[BeamState, Bool[Array, " B"]]:
    """One step further: which continuations of the hypotheses followed end, which are followed on, and which rows go
    on, (B,).

    Args:
        running: (B,), rows that have not stopped; the others keep what they found.
        logits: (B, Z, V), after each hypothesis.
        step: (), steps done before.
        positions: (B,), of the tokens that are chosen.
    """
    batch, size, vocab_size = logits.shape
    ends, rows = terms.end_ids, jnp.arange(batch)[:, None]
    norms = jax.nn.logsumexp(logits, -1)
    failed = running & ((found.live > IMPOSSIBLE) & ~jnp.isfinite(norms)).any(-1)
    if terms.suppressed.size:
        logits = logits.at[:, :, terms.suppressed].set(IMPOSSIBLE)
    if ends.size > 1:
        together = jax.nn.logsumexp(logits[:, :, ends], -1)
        logits = logits.at[:, :, ends].set(IMPOSSIBLE).at[:, :, ends[0]].set(together)

    each = min(2 * size, vocab_size)
    top, tokens = top_k(logits, each)  # equal ones: the lower id first
    totals = (top + (found.live - norms)[:, :, None]).reshape(batch, size * each)
    totals, picked = jax.lax.top_k(totals, min(2 * size, size * each))
    tokens, parents = tokens.reshape(batch, size * each)[rows, picked], picked // each
    ending = tokens == ends[0] if ends.size else jnp.zeros(tokens.shape, bool)

    length, alpha = (step + 1).astype(jnp.float32), terms.alpha
    ended = jnp.where(ending, totals, IMPOSSIBLE)[:, :size]
    scores = jnp.concatenate([found.scores, ended / length_penalty(length, alpha)], 1)
    scores, order = jax.lax.top_k(scores, size)
    live, followed = jax.lax.top_k(jnp.where(ending, IMPOSSIBLE, totals), size)

    def joined(kept, new):
        return jnp.concatenate([kept, jnp.broadcast_to(new, kept.shape)], 1)[rows, order]

    if terms.n_best is None:
        enough = (scores[:, -1] > IMPOSSIBLE) | (live[:, 0] == IMPOSSIBLE)
    else:
        # A further token only takes probability away, and the longest row has the largest penalty to divide by.
        longest = length_penalty(terms.limits.astype(jnp.float32), alpha)
        enough = live[:, 0] / longest <= scores[:, terms.n_best - 1]
    of_rows = {
        "live": live,
        "taken": jnp.full((batch,), step + 1),
        "scores": scores,
        "totals": joined(found.totals, ended),
        "steps": joined(found.steps, step),
        "places": joined(found.places, parents[:, :size]),
        "failed_at": jnp.where(failed, positions, -1),
    }
    for name, new in of_rows.items():
        of_rows[name] = jnp.where(running.reshape(-1, *[1] * (new.ndim - 1)), new, getattr(found, name))
    of_steps = {
        "tokens": found.tokens.at[step].set(tokens[rows, followed]),
        "parents": found.parents.at[step].set(parents[rows, followed]),
    }
    running = running & ~failed & ~enough & (step + 1 < terms.limits)
    return dataclasses.replace(found, **of_rows, **of_steps), running


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The k highest of x (..., V) and their ids, (..., k), falling; of equal ones the first. They stand in those k
    blocks whose maxima are highest, so with a large V this takes a third of the time of `jax.lax.top_k`.
    """
    block = next((size for size in range(48, 15, -1) if x.shape[-1] % size == 0), 32)  # nothing left over, if it can be
    blocks = x.shape[-1] // block
    if blocks <= 4 * k:
        top, ids = jax.lax.top_k(x, k)
        return top, ids
    maxima = x[..., : blocks * block].reshape(*x.shape[:-1], blocks, block).max(-1)
    highest = jnp.sort(jax.lax.top_k(maxima, k)[1], -1)
    behind = jax.lax.broadcasted_iota(highest.dtype, (*highest.shape, block), highest.ndim)
    ids = (highest[..., None] * block + behind).reshape(*highest.shape[:-1], k * block)
    rest = jax.lax.broadcasted_iota(ids.dtype, (*ids.shape[:-1], x.shape[-1] % block), ids.ndim - 1) + blocks * block
    ids = jnp.concatenate([ids, rest], -1)
    top, places = jax.lax.top_k(jnp.take_along_axis(x, ids, -1, mode="promise_in_bounds"), k)
    return top, jnp.take_along_axis(ids, places, -1, mode="promise_in_bounds")
