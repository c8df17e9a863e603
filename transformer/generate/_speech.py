"""Decoding of speech: the rules for timestamp tokens, and the compiled loop for one window of a recording."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.generate._decoding import Batch, decode_hypotheses, prefill, with_unstacked_layers
from transformer.generate._loop import DecodeResult, Slots, Stepper
from transformer.generate._sampling import gumbel_noise
from transformer.nn._axes import Array, Float, Int, Leaf, PRNGKey
from transformer.nn._caches import cache_length
from transformer.nn.models._speech import FRAMES_A_POSITION, SpeechToText


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpeechRules:
    """Which tokens may follow (Radford et al. 2022, arXiv 2212.04356, section 4.5, and its published code).

    In the vocabulary, text tokens are below `end_id`, and timestamps are all ids above `no_timestamps_id`.
    """

    suppressed: Leaf
    """(V,), bool: tokens that are never generated"""
    suppressed_first: Leaf
    """(V,), bool: tokens that are not the first one"""
    end_id: Leaf
    """(), the token that ends a transcript"""
    no_timestamps_id: Leaf
    """(), the token before the first timestamp"""
    last_first: Leaf
    """(), the last timestamp that may come first"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpeechState:
    """The tokens that the rules depend on, and how probable all tokens are."""

    step: Leaf
    """(), number of generated tokens"""
    last: Leaf
    """(B,), the last token"""
    before: Leaf
    """(B,), the token before it"""
    latest: Leaf
    """(B,), the last timestamp; -1: none yet"""
    log_probability: Leaf
    """(B,), sum of the log-probabilities of the tokens, the end token included"""

    @staticmethod
    def empty(batch: int) -> SpeechState:
        """Return the state before the first token."""
        none = jnp.full((batch,), -1, jnp.int32)
        return SpeechState(jnp.int32(0), none, none, none, jnp.zeros((batch,), jnp.float32))

    def add(self, tokens: Int[Array, " B"], log_probability: Float[Array, " B"], rules: SpeechRules) -> SpeechState:
        """Return the state after one more token per row, (B,), with its log-probability, or 0 for an ended row."""
        latest = jnp.where(tokens > rules.no_timestamps_id, tokens, self.latest)
        return SpeechState(self.step + 1, tokens, self.last, latest, self.log_probability + log_probability)


def apply_rules(
    logits: Float[Array, "B V"], state: SpeechState, rules: SpeechRules, timestamps: bool
) -> Float[Array, "B V"]:
    """Set the logits of tokens that may not follow to -inf.

    With `timestamps`:

    - The first token is a timestamp, at most `last_first`.
    - Timestamps come in pairs, the end of one segment and the start of the next, except for the first one and before
      the end token.
    - Timestamps don't decrease, and the end of a segment is later than its start.
    - If the timestamps together are more probable than every single other token, the next token is a timestamp.
    """
    ids = jnp.arange(logits.shape[-1])[None, :]
    forbidden = rules.suppressed[None, :] | (rules.suppressed_first[None, :] & (state.step == 0))
    if not timestamps:
        return jnp.where(forbidden, -jnp.inf, logits)
    times = ids > rules.no_timestamps_id
    was_time = ((state.step > 0) & (state.last > rules.no_timestamps_id))[:, None]
    # A transcript starts with a single timestamp: it counts as the second one of a pair.
    before_was_time = ((state.step < 2) | (state.before > rules.no_timestamps_id))[:, None]
    open_pair = was_time & ~before_was_time
    forbidden |= ids == rules.no_timestamps_id
    forbidden |= was_time & before_was_time & times
    forbidden |= open_pair & (ids < rules.end_id)
    # The start of a segment may equal the end of the previous one; its own end may not equal its start.
    forbidden |= times & (ids < state.latest[:, None] + ~open_pair)
    forbidden |= (state.step == 0) & (~times | (ids > rules.last_first))
    logits = jnp.where(forbidden, -jnp.inf, logits)
    # Sums of probabilities are compared without their common normalizer.
    together = jax.nn.logsumexp(jnp.where(times, logits, -jnp.inf), -1, keepdims=True)
    best_text = jnp.where(times, -jnp.inf, logits).max(-1, keepdims=True)
    return jnp.where(~times & (together > best_text), -jnp.inf, logits)


@functools.partial(jax.jit, static_argnames=("model", "cache_slots"))
def start_window(
    model: SpeechToText, params: Any, frames: Float[Array, "B F M"], start_id: Int[Array, ""], *, cache_slots: int
) -> tuple[Float[Array, "B V"], Any]:
    """Encode windows of recordings, and read the token that starts a transcript.

    Args:
        model: a `SpeechToText`.
        params: its parameters.
        frames: (B, F, M).
        start_id: ().
        cache_slots: positions per row in the KV cache.

    Returns:
        The logits (B, V) after the start token, and the KV cache, which `decode_window` can use several times.
    """
    batch = frames.shape[0]
    prompts = Batch(tokens=jnp.full((batch, 1), start_id, jnp.int32), lengths=jnp.ones((batch,), jnp.int32))
    return prefill(model, params, prompts, _source(frames.shape[1], batch, frames), cache_slots)


def _source(frames: int, batch: int, tokens: Any) -> Batch:
    return Batch(tokens=tokens, lengths=jnp.full((batch,), -(-frames // FRAMES_A_POSITION), jnp.int32))


@functools.partial(jax.jit, static_argnames=("model", "num_frames", "new_slots", "timestamps"))
def decode_window(
    model: SpeechToText,
    params: Any,
    logits: Float[Array, "B V"],
    cache: Any,
    prompt: Int[Array, "B P"],
    temperature: Float[Array, ""],
    key: PRNGKey,
    limit: Int[Array, ""],
    rules: SpeechRules,
    *,
    num_frames: int,
    new_slots: int,
    timestamps: bool,
) -> tuple[DecodeResult, Float[Array, " B"]]:
    """Generate the transcripts of windows until every row has ended or has `limit` tokens.

    Compiled once per model, shapes and `timestamps`; the temperature may change.

    Args:
        model: a `SpeechToText`.
        params: its parameters.
        logits: (B, V), of `start_window`.
        cache: the cache of `start_window`.
        prompt: (B, P), tokens after the start token: language and task; P may be 0.
        temperature: (), of sampling; 0 is greedy decoding.
        key: random key; the token of step i is drawn with `fold_in(key, i)`.
        limit: (), maximum number of tokens, at most `new_slots`.
        rules: which tokens may follow.
        num_frames: F, frames per window.
        new_slots: size of the output.
        timestamps: whether timestamps are generated.

    Returns:
        The tokens of the windows, and the sum of their log-probabilities, (B,), the end token included.
    """
    batch, vocab_size = logits.shape
    source = _source(num_frames, batch, None)
    model, params, cache = with_unstacked_layers(model, params, cache)
    if prompt.shape[1]:
        every, cache = decode_hypotheses(model, params, prompt, None, None, cache, source)
        logits = every[:, -1]

    def draw(slots, logits, positions):
        state, logits = slots.history, logits[:, 0].astype(jnp.float32)
        finite = jnp.isfinite(logits.max(-1)).all()
        logits = apply_rules(logits, state, rules, timestamps)
        noise = gumbel_noise(jax.random.fold_in(slots.keys, state.step), (batch, vocab_size))
        # Gumbel-max sampling: argmax of logits / temperature + noise; without noise at temperature 0.
        scores = jnp.where(temperature > 0, logits / jnp.where(temperature > 0, temperature, 1.0) + noise, logits)
        tokens = jnp.argmax(scores, -1).astype(jnp.int32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
        state = state.add(tokens, jnp.where(slots.running, chosen, 0.0), rules)
        return jnp.where(finite, tokens, -1)[:, None], state

    stepper = Stepper(model, params, draw, rules.end_id[None], limit, source)
    slots = Slots.started(key, cache, DecodeResult.blank(batch, new_slots), SpeechState.empty(batch))
    slots = stepper.sample(slots, logits, cache_length(cache))
    slots = jax.lax.while_loop(Slots.unfinished, stepper.advance, slots)
    return slots.result, slots.history.log_probability
