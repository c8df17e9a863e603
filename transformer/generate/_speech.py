"""Decoding of speech: the rules for timestamp tokens, and the compiled loop for one window of a recording."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer.generate._decoding import Batch, decode_hypotheses, prefill, with_unstacked_layers
from transformer.generate._layers import Cache, Params
from transformer.generate._loop import DecodeResult, Drawn, Slots, Stepper
from transformer.generate._sampling import gumbel_noise
from transformer.nn._axes import Array, Float, Int, Leaf, PRNGKey
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
    model: SpeechToText, params: Params, frames: Float[Array, "B F M"], start_id: Int[Array, ""], *, cache_slots: int
) -> tuple[Float[Array, "B V"], Cache]:
    """Encode windows of recordings, and read the token that starts a transcript.

    Return the logits after the start token, and the KV cache, which `decode_window` can use several times.
    """
    batch = frames.shape[0]
    prompts = Batch(tokens=jnp.full((batch, 1), start_id, jnp.int32), lengths=jnp.ones((batch,), jnp.int32))
    return prefill(model, params, prompts, _source(frames.shape[1], batch, frames), cache_slots)


def _source(frames: int, batch: int, tokens: Leaf | None) -> Batch:
    return Batch(tokens=tokens, lengths=jnp.full((batch,), -(-frames // FRAMES_A_POSITION), jnp.int32))


@functools.partial(jax.jit, static_argnames=("model", "num_frames", "new_slots", "timestamps"))
def decode_window(
    model: SpeechToText,
    params: Params,
    logits: Float[Array, "B V"],
    cache: Cache,
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
    """Generate the transcripts of windows until every row has ended or has `limit` tokens, at most `new_slots`.

    Logits and cache are those of `start_window`. The tokens `prompt` come after the start token: language and task. The
    token of step i is drawn with `fold_in(key, i)`; temperature 0 is greedy decoding. Compiled once per model, shapes
    and `timestamps`.

    Return the tokens of the windows, and the sum of their log-probabilities, the end token included.
    """
    batch = logits.shape[0]
    source = _source(num_frames, batch, None)
    model, params, cache = with_unstacked_layers(model, params, cache)
    if prompt.shape[1]:
        every, cache = decode_hypotheses(model, params, prompt, cache, source)
        logits = every[:, -1]

    sampling = {"temperature": temperature, "rules": rules, "timestamps": timestamps}
    stepper = SpeechStepper(model, params, None, rules.end_id[None], limit, source, **sampling)
    slots = stepper.run(stepper.start(key, cache, logits, new_slots, SpeechState.empty(batch)))
    return slots.result, slots.history.log_probability


@dataclass(frozen=True, kw_only=True)
class SpeechStepper(Stepper):
    """The step of transcripts: sampling with the rules, whose state is the history."""

    temperature: Float[Array, ""]
    rules: SpeechRules
    timestamps: bool

    def draw(self, slots: Slots, logits: Float[Array, "B 1 V"], positions: Int[Array, "B 1"]) -> Drawn:
        """Sample the next tokens, with noise of the number of the step; -1 in all rows if a logit is not finite."""
        state, logits, temperature = slots.history, logits[:, 0].astype(jnp.float32), self.temperature
        finite = jnp.isfinite(logits.max(-1)).all()
        logits = apply_rules(logits, state, self.rules, self.timestamps)
        noise = gumbel_noise(jax.random.fold_in(slots.keys, state.step), logits.shape)
        # Gumbel-max sampling: argmax of logits / temperature + noise; without noise at temperature 0.
        scores = jnp.where(temperature > 0, logits / jnp.where(temperature > 0, temperature, 1.0) + noise, logits)
        tokens = jnp.argmax(scores, -1).astype(jnp.int32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
        state = state.add(tokens, jnp.where(slots.running, chosen, 0.0), self.rules)
        return jnp.where(finite, tokens, -1)[:, None], state
