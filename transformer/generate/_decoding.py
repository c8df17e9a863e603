"""The compiled part: prefill, one-token step and the loop around it, pure functions of model, parameters and arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.generate._layers import keeps_apart, separate, separated
from transformer.generate._sampling import SamplerParams, choose
from transformer.nn._axes import Array, Float, Int, Leaf, PRNGKey, Tokens
from transformer.nn._caches import ContextCache, cache_length, set_cache_length
from transformer.nn._masks import Mask
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._seq2seq import Seq2Seq


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of token ids of unlike lengths, padded on the right."""

    tokens: Leaf
    """(B, T); what stands behind a row's end must be ids that the row may hold. Of a SpeechToText's source: frames"""
    lengths: Leaf
    """(B,); of frames: positions of the encoder"""


def prefill(
    model: CausalLM | Seq2Seq, params: Any, prompts: Batch, source: Batch | None, cache_slots: int
) -> tuple[Float[Array, "B V"], Any]:
    """Reads whole prompts (and sources) at once: logits (B, V) after the last token of each, and the filled cache."""
    cache = model.init_cache(prompts.tokens.shape[0], cache_slots)
    hidden, cache = _hidden(model, params, source, prompts.tokens, cache, source)
    last = jnp.take_along_axis(hidden, prompts.lengths[:, None, None] - 1, axis=1)
    return _logits(model, params, last), set_cache_length(cache, prompts.lengths)


def decode_step(
    model: CausalLM | Seq2Seq, params: Any, tokens: Int[Array, " B"], cache: Any, source: Batch | None
) -> tuple[Float[Array, "B V"], Any]:
    """One more token a row, (B,): the logits after it, (B, V), and the cache that holds it. Of the source, only its
    lengths are read: its keys and values are in the cache.
    """
    logits, cache = decode_side_by_side(model, params, tokens[:, None], None, None, cache, source)
    return logits[:, 0], cache


def decode_side_by_side(
    model: CausalLM | Seq2Seq,
    params: Any,
    tokens: Int[Array, "B Z"],
    positions: Int[Array, "B Z"] | None,
    mask: Mask | None,
    cache: Any,
    source: Batch | None,
) -> tuple[Float[Array, "B Z V"], Any]:
    """One more token of each of Z hypotheses a row, (B, Z), at `positions` and attending to what `mask` leaves of the
    cache: the logits after each, (B, Z, V), and the cache that holds them. Of the source, as in `decode_step`.
    """
    hidden, grown = _hidden(model, params, None, tokens, cache, source, positions, mask)
    logits = model.apply({"params": params}, hidden, method=type(model).head)
    return logits, _with_context(grown, cache)


def read(model: CausalLM, params: Any, tokens: Tokens, cache: Any) -> tuple[Float[Array, "B T V"], Any]:
    """T more tokens a row, (B, T), the last of which may be one too many for a learned position table: the logits after
    each, (B, T, V), and the cache that holds them.
    """
    positions = cache_length(cache)[:, None] + jnp.arange(tokens.shape[1])[None, :]
    if model.config.position == "learned":
        positions = jnp.minimum(positions, model.config.max_length - 1)  # past the table would be NaN, to all who look
    variables = {"params": params}
    hidden, cache = model.apply(variables, tokens, positions, cache=cache, method=CausalLM.hidden)
    return model.apply(variables, hidden, method=CausalLM.head), cache


def with_separate_layers(model: CausalLM | Seq2Seq, params: Any, cache: Any) -> tuple[CausalLM | Seq2Seq, Any, Any]:
    """Model, and trees of parameters and cache, as a loop over tokens takes them: where `keeps_apart` says so, each
    layer's part a tree of its own.
    """
    if not keeps_apart(model, params):
        return model, params, cache
    params = {**params, "decoder": separate(model, params["decoder"])}
    return separated(model), params, separate(model, cache)


def _hidden(model, params, read, tokens: Tokens, cache, source, positions=None, mask=None):
    variables, given = {"params": params}, {"positions": positions, "mask": mask, "cache": cache}
    if isinstance(model, CausalLM):
        return model.apply(variables, tokens, **given, method=CausalLM.hidden)
    return model.apply(
        variables,
        None if read is None else read.tokens,
        tokens,
        source_mask=Mask.lengths(source.lengths),
        **given,
        method=Seq2Seq.hidden,
    )


def _logits(model, params, hidden: Float[Array, "B 1 D"]) -> Float[Array, "B V"]:
    return model.apply({"params": params}, hidden, method=type(model).head)[:, 0]


def _with_context(cache: Any, before: Any) -> Any:
    """The cache with the cross-attention part as it was: a scan over layers would write a copy of it at each step."""

    def is_context(node):
        return isinstance(node, ContextCache)

    return jax.tree.map(lambda new, old: old if is_context(new) else new, cache, before, is_leaf=is_context)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeResult:
    """What the loop leaves behind."""

    tokens: Leaf
    """(B, new_slots), new tokens; meaningless from `counts` on"""
    counts: Leaf
    """(B,), how many new tokens each row has, without the end of sequence"""
    failed_at: Leaf
    """(B,), position whose logits were not finite, or -1. The loop stops at the first, for all rows"""

    @staticmethod
    def blank(batch: int, new_slots: int) -> DecodeResult:
        """Nothing yet."""
        return DecodeResult(
            tokens=jnp.zeros((batch, new_slots), jnp.int32),
            counts=jnp.zeros((batch,), jnp.int32),
            failed_at=jnp.full((batch,), -1, jnp.int32),
        )


@functools.partial(jax.jit, static_argnames=("model", "cache_slots", "new_slots"))
def decode(
    model: CausalLM | Seq2Seq,
    params: Any,
    prompts: Batch,
    source: Batch | None,
    keys: PRNGKey,
    choice: SamplerParams,
    eos_ids: Int[Array, " E"],
    limit: Int[Array, ""],
    *,
    cache_slots: int,
    new_slots: int,
) -> DecodeResult:
    """Prefill, then one loop until every row has ended or has `limit` new tokens. Compiled once for each model, shape
    of the arrays and kind of `choice`.

    Args:
        keys: (B,), one a row; the token at position p is drawn from `fold_in(key, p)`.
        eos_ids: (E,), each ends a row; -1: nothing does.
        limit: new tokens at most, no more than `new_slots`.
    """
    logits, cache = prefill(model, params, prompts, source, cache_slots)
    model, params, cache = with_separate_layers(model, params, cache)
    batch = prompts.lengths.shape[0]

    def draw(logits, positions):
        return choose(logits, jax.vmap(jax.random.fold_in)(keys, positions), choice)

    def record(written, step, running, tokens, positions):
        failed, ended = running & (tokens < 0), (tokens[:, None] == eos_ids[None, :]).any(1)
        running = running & ~failed & ~ended
        written = DecodeResult(
            tokens=jax.lax.dynamic_update_slice(written.tokens, tokens[:, None], (jnp.int32(0), step)),
            counts=written.counts + running,
            failed_at=jnp.where(failed, positions, written.failed_at),
        )
        return written, running

    def unfinished(state):
        step, _, running, _, written = state
        return (step < limit) & running.any() & (written.failed_at < 0).all()

    def advance(state):
        step, tokens, running, cache, written = state
        # A row that failed holds -1, one that ended goes on unread: either way an id inside the vocabulary.
        logits, cache = decode_step(model, params, jnp.maximum(tokens, 0), cache, source)
        positions = cache_length(cache)
        tokens = draw(logits, positions)
        written, running = record(written, step, running, tokens, positions)
        return step + 1, tokens, running, cache, written

    tokens = draw(logits, prompts.lengths)
    written, running = record(
        DecodeResult.blank(batch, new_slots), jnp.int32(0), jnp.ones((batch,), bool), tokens, prompts.lengths
    )
    return jax.lax.while_loop(unfinished, advance, (jnp.int32(1), tokens, running, cache, written))[-1]
