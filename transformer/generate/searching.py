"""The compiled part of beam search: pure functions of model, parameters and arrays. A place is that of one of the Z
hypotheses that are followed for each row, a number below Z.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from transformer.attention import KVCache
from transformer.axes import Array, Bool, Float, Int, Leaf
from transformer.blocks import LayerCache
from transformer.generate.decoding import Rows, decode_step, prefill
from transformer.generate.layers import separate, separated
from transformer.models import CausalLM, Seq2Seq

IMPOSSIBLE = -jnp.inf
"""log-probability of what is not there"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Terms:
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
class Found:
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

    found: Found
    step: Leaf
    """(), steps done"""
    running: Leaf
    """(B,), whether a row goes on"""
    cache: Any
    """of all hypotheses: its self-attention has an axis Z"""

    def unfinished(self) -> Bool[Array, ""]:
        """Whether there is something left to do."""
        return self.running.any() & (self.found.failed_at < 0).all()

    def slots(self) -> int:
        """How many tokens the cache can hold."""
        name, part = next(iter(self.cache.items()))
        layer = jax.tree.leaves(part, is_leaf=_is_layer)[0]
        return layer.self_attention.positions.shape[3 if name == "layers" else 2]


def length_penalty(length: Float[Array, "..."], alpha: Float[Array, ""]) -> Float[Array, "..."]:
    """((5 + length) / 6)^alpha (Wu et al. 2016, arXiv 1609.08144, equation 14, where 6 is 5 + 1)."""
    return ((5.0 + length) / 6.0) ** alpha


def search(
    model: CausalLM | Seq2Seq,
    params: Any,
    prompts: Rows,
    source: Rows | None,
    terms: Terms,
    new_slots: int,
) -> Found:
    """The whole search, of up to `new_slots` new tokens a row.

    Every step reads and moves the whole cache, filled or not. Few targets are twice as long as their source: the cache
    is, at first, and as long as it may have to be only for what does not end by then.
    """
    slots = prompts.tokens.shape[1]
    first = new_slots if source is None else min(new_slots, 2 * source.tokens.shape[1])
    begun = begin(model, params, prompts, source, terms, cache_slots=slots + first, new_slots=new_slots)
    begun = go_on(model, params, begun, source, prompts.lengths, terms, cache_slots=slots + first)
    if first < new_slots and begun.unfinished():
        begun = go_on(model, params, begun, source, prompts.lengths, terms, cache_slots=slots + new_slots)
    return begun.found


@functools.partial(jax.jit, static_argnames=("model", "cache_slots", "new_slots"))
def begin(
    model: CausalLM | Seq2Seq,
    params: Any,
    prompts: Rows,
    source: Rows | None,
    terms: Terms,
    *,
    cache_slots: int,
    new_slots: int,
) -> Search:
    """Prefill of each row, once, and the first tokens of its hypotheses. Compiled once for each model and shape."""
    logits, cache = prefill(model, params, prompts, source, cache_slots)
    if not model.execution.scan:
        cache = separate(model, cache)
    batch, size = prompts.lengths.shape[0], terms.size
    none = jnp.full((batch, size), IMPOSSIBLE, jnp.float32)
    zeros = jnp.zeros((batch, size), jnp.int32)
    found = Found(
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
    logits, step = jnp.broadcast_to(logits, (size, *logits.shape)), jnp.int32(0)
    found, running = choose(found, jnp.ones((batch,), bool), logits, step, prompts.lengths, terms)
    cache = _each_cache(lambda kept, axis: jax.tree.map(lambda a: _repeated(a, size, axis), kept), cache)
    return Search(found, step + 1, running, cache)


@functools.partial(jax.jit, static_argnames=("model", "cache_slots"))
def go_on(
    model: CausalLM | Seq2Seq,
    params: Any,
    begun: Search,
    source: Rows | None,
    lengths: Int[Array, " B"],
    terms: Terms,
    *,
    cache_slots: int,
) -> Search:
    """One loop until every row has stopped, or a cache of `cache_slots` is full. Compiled once for each model and
    shape.

    Hypotheses are an axis Z in front of the rows, by `jax.vmap`, and only in the cache of self-attention: the Z
    hypotheses of a row are Z queries of the same keys and values of cross-attention, of which there is one copy.

    Args:
        begun: with a cache of so many slots, or fewer.
        lengths: (B,), of the prompts.
    """
    if not model.execution.scan:
        params = {**params, "decoder": separate(model, params["decoder"])}
        model = separated(model)
    room = cache_slots - begun.slots()
    cache = _each_cache(lambda kept, axis: _longer(kept, room, axis), begun.cache)
    axes = _axes(cache)
    last = cache_slots - lengths.max()

    def one(tokens, cache):
        return decode_step(model, params, tokens, cache, source)

    def advance(now):
        tokens, parents = now.found.tokens[now.step - 1].T, now.found.parents[now.step - 1].T
        cache = _each_cache(lambda kept, axis: jax.tree.map(lambda a: _of(a, parents, axis), kept), now.cache)
        logits, cache = jax.vmap(one, in_axes=(0, axes), out_axes=(0, axes))(tokens, cache)
        found, running = choose(now.found, now.running, logits, now.step, lengths + now.step, terms)
        return Search(found, now.step + 1, running, cache)

    # So many steps that another token would find no slot.
    return jax.lax.while_loop(
        lambda now: now.unfinished() & (now.step <= last), advance, dataclasses.replace(begun, cache=cache)
    )


def choose(
    found: Found,
    running: Bool[Array, " B"],
    logits: Float[Array, "Z B V"],
    step: Int[Array, ""],
    positions: Int[Array, " B"],
    terms: Terms,
) -> tuple[Found, Bool[Array, " B"]]:
    """One step further: which continuations of the hypotheses followed end, which are followed on, and which rows go
    on, (B,).

    Args:
        running: (B,), rows that have not stopped; the others keep what they found.
        logits: (Z, B, V), after each hypothesis.
        step: (), steps done before.
        positions: (B,), of the tokens that are chosen.
    """
    size, batch, vocab_size = logits.shape
    ends, rows = terms.end_ids, jnp.arange(batch)[:, None]
    norms = jax.nn.logsumexp(logits, -1).T
    failed = running & ((found.live > IMPOSSIBLE) & ~jnp.isfinite(norms)).any(-1)
    if terms.suppressed.size:
        logits = logits.at[:, :, terms.suppressed].set(IMPOSSIBLE)
    if ends.size > 1:
        together = jax.nn.logsumexp(logits[:, :, ends], -1)
        logits = logits.at[:, :, ends].set(IMPOSSIBLE).at[:, :, ends[0]].set(together)

    each = min(2 * size, vocab_size)
    top, tokens = jax.lax.top_k(logits.reshape(size * batch, vocab_size), each)  # equal ones: the lower id first
    top, tokens = (a.reshape(size, batch, each).transpose(1, 0, 2) for a in (top, tokens))
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


def _is_layer(node: Any) -> bool:
    return isinstance(node, LayerCache)


def _axes(cache: Any) -> Any:
    """Where the axis of hypotheses is, in each layer of a cache; cross-attention has none. Behind that of layers, where
    they are stacked: a scan over them would move it there, and copy the cache.
    """

    def of(part: Any, axis: int) -> Any:
        return jax.tree.map(lambda layer: LayerCache(axis, None), part, is_leaf=_is_layer)

    return {name: of(part, 1 if name == "layers" else 0) for name, part in cache.items()}


def _each_cache(change: Callable[[KVCache, int], KVCache], cache: Any) -> Any:
    """The cache with `change(kept, axis)` for what each self-attention has kept."""

    def changed(where: LayerCache, layer: LayerCache) -> LayerCache:
        return LayerCache(change(layer.self_attention, where.self_attention), layer.cross_attention)

    return jax.tree.map(changed, _axes(cache), cache, is_leaf=_is_layer)


def _repeated(array: Array, size: int, axis: int) -> Array:
    return jnp.repeat(jnp.expand_dims(array, axis), size, axis)


def _of(array: Array, parents: Int[Array, "Z B"], axis: int) -> Array:
    """Of each row the hypotheses `parents`, in an array (Z, B, ...), or (L, Z, B, ...) where `axis` is 1."""
    places = parents.reshape((1,) * axis + parents.shape + (1,) * (array.ndim - axis - 2))
    return jnp.take_along_axis(array, places, axis, mode="promise_in_bounds")


def _longer(kept: KVCache, room: int, axis: int) -> KVCache:
    """With so many more slots."""

    def longer(array: Array) -> Array:
        widths = [(0, 0)] * array.ndim
        widths[axis + 2] = (0, room)
        return jnp.pad(array, widths)

    return KVCache(longer(kept.key), longer(kept.value), longer(kept.positions), kept.length)
