"""Generate a text in pieces: the tokens of one row arrive while later ones are still being computed.

`generate` runs one compiled loop until all rows have ended. Here the loop is interrupted after a few tokens. The number
of compiled programs is bounded: one for each width in `WIDTHS` that reads prompts, and one that generates tokens, for
each size of the KV cache (a power of two). The cache is kept after a text: a prompt that begins with the same tokens,
such as the next turn of a conversation, reads only its new ones.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import flax.linen as nn
import jax
import numpy as np

from transformer.config._progress import counting
from transformer.generate._constraints import Constraint, next_allowed
from transformer.generate._decoding import last_logits, read_tokens
from transformer.generate._generation import check_finite, row_keys
from transformer.generate._layers import Cache, Params, copied_for_decoding, uses_unstacked_layers
from transformer.generate._loop import DecodeResult, Slots, Stepper
from transformer.generate._penalties import History
from transformer.generate._prompts import (
    Ids,
    bucket,
    check_lengths,
    check_new_tokens,
    check_rows,
    check_text_model,
    common_prefix,
    decoding_model,
    end_ids,
    image_rows,
    row_seeds,
    warn_if_rescaled,
)
from transformer.generate._sampling import PLAIN, SamplerParams, Sampling
from transformer.nn._axes import Array, Float, Int, Leaf, PRNGKey
from transformer.nn._caches import lengthen_cache, set_cache_length
from transformer.nn._masks import Mask
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._dynamic_images import ImagePatches

WIDTHS = (16, 64, 256, 1024)
"""numbers of tokens that one call reads; the last tokens of a prompt are padded to the next width"""
SMALLEST_CACHE = 256
"""smallest number of cache slots, unless the position table is shorter"""
MOST_STEPS = 64
"""maximum number of tokens in a piece"""
SECONDS = 0.05
"""intended time between two pieces"""


@dataclass(frozen=True)
class Piece:
    """The next tokens of a text."""

    tokens: list[int]
    """without an end token"""
    log_probabilities: list[float]
    """of each token under the model, before penalties, temperature and filters"""
    ended: bool
    """the model generated an end token after these"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Row:
    """State of the row between two pieces."""

    logits: Leaf
    """(1, V), for the next token"""
    cache: Leaf
    history: History | None


class TokenStream:
    """Generates texts with a `CausalLM`, one at a time, in pieces.

    Tokens equal those of `generate` for one prompt and the same seed, up to rounding: a prompt that is read in parts
    can round logits differently. An instance must not be used by two threads at the same time. A text can't be
    continued after another one was started, which takes over the cache.

    Raises:
        ValueError: the model is not a `CausalLM`.
    """

    def __init__(self, model: nn.Module, params: Params):
        self.vocab_size = check_text_model("TokenStream", model, params)
        if not isinstance(model, CausalLM):
            raise ValueError(f"TokenStream needs a CausalLM, got a {type(model).__name__}. Use generate.")
        self._original = params
        model = decoding_model(model)
        if uses_unstacked_layers(model, params):
            model, params = copied_for_decoding(model, params)
        self._model, self._params = model, params
        self.forget()

    def forget(self) -> None:
        """Drop the cache of the last text."""
        self._cache: Cache | None = None
        self._slots = 0
        self._read: list[int] = []  # tokens whose keys and values are in the cache
        self._images: np.ndarray | ImagePatches | None = None  # images among them
        self._text: object = None  # identifies the text that uses the cache

    def generate(
        self,
        prompt: Ids,
        *,
        max_new_tokens: SupportsIndex,
        sampling: Sampling = PLAIN,
        eos_id: SupportsIndex | Sequence[SupportsIndex] | None = None,
        seed: SupportsIndex = 0,
        images: Sequence[Any] | None = None,
        constraint: Constraint | None = None,
    ) -> Iterator[Piece]:
        """Yield the continuation of a prompt in pieces. The arguments are those of `transformer.generate.generate`.

        The iterator can be closed at any time. All arguments are checked before it is returned. `images` are those of
        this one prompt. A prompt with images is read in one call, unless it continues the last text and has no other
        images. With a `constraint`, such as one of `transformer.inference.Grammars`, each token is one that it allows,
        a piece has one token, and `eos_id` must be None: the constraint knows the end tokens.

        Raises:
            ValueError: invalid arguments; while iterating: logits are not finite, or the constraint can't continue.
            RuntimeError: while iterating: another text was started, or `forget` was called.
        """
        limit = check_new_tokens(max_new_tokens)
        ends = end_ids(eos_id, self.vocab_size)
        if constraint is not None:
            ends = _checked_ends(constraint, ends, self.vocab_size)
        (row,) = check_rows("prompt", [prompt], self.vocab_size)
        check_lengths(self._model.config, [row], limit)
        pixels = image_rows(self._model, [row], None if images is None else [images])
        keys = row_keys(*row_seeds(seed, 1))
        choice = SamplerParams.of(sampling, self.vocab_size)
        return self._pieces(row, limit, keys, choice, np.array(ends or [-1], np.int32), pixels, constraint)

    def _pieces(
        self,
        prompt: np.ndarray,
        limit: int,
        keys: PRNGKey,
        choice: SamplerParams,
        ends: np.ndarray,
        pixels: np.ndarray | ImagePatches | None,
        constraint: Constraint | None,
    ) -> Iterator[Piece]:
        text = self._text = object()
        state = self._prefilled(prompt, limit, choice, pixels)
        steps, ended, left = 1, False, limit
        while left and not ended:
            if self._text is not text:
                raise RuntimeError(
                    "this text can't be continued, because another one was started with the same TokenStream or Chat, "
                    "or its cache was dropped: expected one text at a time. Read a text to its end before the next "
                    "one, or use two instances."
                )
            started = time.perf_counter()
            allowed = None if constraint is None else next_allowed(constraint, choice.suppressed)
            read, self._read, self._cache = self._read, [], None  # if this is interrupted, the cache is lost
            stepper = Stepper(self._model, self._params, choice, ends, np.int32(min(steps, left)), allowed=allowed)
            state, out = _advance(stepper, state, keys)
            out = jax.device_get(out)
            check_finite(out.failed_at, [prompt], self._original, self._model.config.dtype)
            ended, count = bool(out.ended[0]), int(out.counts[0])
            self._read, self._cache = [*read, *out.tokens[0, : count + ended].tolist()], state.cache
            warn_if_rescaled(self._model.config, len(prompt), len(self._read) - 1)  # the last one has no effect yet
            left -= count
            tokens, scores = (values[0, :count].tolist() for values in (out.tokens, out.log_probabilities))
            if constraint is not None and not ended:
                constraint.accept(tokens[0])
            yield Piece(tokens, scores, ended)
            if constraint is not None:
                continue  # which tokens are allowed depends on the last one, so there is one step at a time
            # The first call includes the compilation, so the number of steps at most doubles in each piece.
            seconds = (time.perf_counter() - started) / max(count + ended, 1)
            steps = max(1, min(MOST_STEPS, round(SECONDS / max(seconds, 1e-6)), 2 * steps))

    def _prefilled(
        self, prompt: np.ndarray, limit: int, choice: SamplerParams, pixels: np.ndarray | ImagePatches | None
    ) -> _Row:
        """Read the tokens of a prompt that are not in the cache yet."""
        tokens, longest = prompt.tolist(), self._model.config.unscaled_length
        # Rotary scaling by the length changes all keys and values of a text that is longer: read all of it together.
        rescaled = longest is not None and len(tokens) > longest
        self._make_room((bucket(len(prompt)) if rescaled or pixels is not None else len(prompt)) + limit)
        same = common_prefix(tokens[:-1], self._read)  # the last token is read again, for its logits
        if rescaled or (self._model.config.has_linear_attention and same < len(self._read)):
            same = 0  # a state of linear attention can't go back to fewer tokens
        if pixels is not None and self._has_images(prompt, same, pixels):
            pixels = None
        cache, self._cache, self._read = self._cache, None, []
        logits = None
        parts = _parts(same, len(tokens), self._slots)
        if pixels is not None:  # the tokens of an image may attend to one another: read all of them together
            self._images = pixels
        if rescaled or pixels is not None:
            parts = iter([(0, len(tokens), bucket(len(tokens)))])
        add = counting("prompt tokens", len(tokens) - same)
        for start, end, width in parts:
            part = np.pad(prompt[start:end], (0, width - (end - start)), mode="edge")[None].astype(np.int32)
            before, count = np.array([[start], [end - start]], np.int32)
            logits, cache = read_part(self._model, self._params, part, before, count, cache, pixels)
            if width == WIDTHS[-1]:
                logits.block_until_ready()  # progress counts what is computed, not what is queued
            add(end - start)
        self._cache, self._read = cache, tokens
        history = None
        if choice.penalties is not None:
            seen = np.zeros((1, self.vocab_size), bool)
            seen[0, prompt] = True
            history = History(seen, np.zeros(seen.shape, np.int32))
        return _Row(logits, cache, history)

    def _has_images(self, prompt: np.ndarray, same: int, pixels: np.ndarray | ImagePatches) -> bool:
        """Return whether the first `same` tokens of the prompt, which are in the cache, contain all of its images."""
        fixed, dynamic = self._model.config.image_tokens, self._model.config.dynamic_images
        inside = not (prompt[same:] == (fixed or dynamic).token_id).any()
        if not inside or self._images is None or (fixed is not None and fixed.attention == "prefix"):
            return False
        pairs = zip(jax.tree.leaves(self._images), jax.tree.leaves(pixels), strict=True)
        return all(np.array_equal(one, other) for one, other in pairs)

    def _make_room(self, needed: int) -> None:
        """Create or lengthen the cache, to a power of two or to the length of the position table."""
        slots = max(SMALLEST_CACHE, 1 << (needed - 1).bit_length())
        if self._model.config.max_length is not None:
            slots = min(slots, max(self._model.config.max_length, needed))
        if self._cache is None:
            self._read, self._slots = [], max(slots, self._slots)
            self._cache = self._model.init_cache(1, self._slots)
        elif slots > self._slots:
            self._cache, self._slots = lengthen_cache(self._cache, slots - self._slots), slots


def _checked_ends(constraint: Constraint, ends: Sequence[int], vocab_size: int) -> list[int]:
    """Return the end tokens of a constraint. Raise ValueError if it does not fit the model or the call."""
    if ends:
        raise ValueError(f"eos_id must be None with a constraint, which has end tokens, got {ends}. Remove eos_id.")
    if constraint.vocab_size != vocab_size:
        raise ValueError(
            f"the constraint is for {constraint.vocab_size} token ids, but the model has {vocab_size}. Create it with "
            f"the vocab_size of the model."
        )
    return end_ids(constraint.end_ids, vocab_size)


def _parts(start: int, end: int, slots: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, width) of the calls that read tokens from `start` to `end` into a cache of `slots`."""
    widths = [width for width in WIDTHS if width <= slots] or [slots]
    while start < end:
        # The last part is one padded call.
        width = next((width for width in widths if width >= end - start), widths[-1])
        yield start, min(end, start + width), width
        start += width


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def read_part(
    model: CausalLM,
    params: Params,
    tokens: Int[Array, "1 T"],
    before: Int[Array, " 1"],
    count: Int[Array, " 1"],
    cache: Cache,
    images: Float[Array, "1 I ..."] | ImagePatches | None = None,
) -> tuple[Float[Array, "1 V"], Cache]:
    """Read `count` of T tokens after the first `before` of the cache; return the last logits, and the cache."""
    masked = images is not None or model.config.reads_lengths  # the mask must hide the padding, the other tokens
    mask = Mask.lengths(before + count) if masked else None
    hidden, cache = read_tokens(model, params, tokens, set_cache_length(cache, before), mask, images)
    return last_logits(model, params, hidden, count), set_cache_length(cache, before + count)


@functools.partial(jax.jit, donate_argnames="state")
def _advance(stepper: Stepper, state: _Row, keys: PRNGKey) -> tuple[_Row, DecodeResult]:
    """Generate at most `limit` tokens, and read each of them into the cache."""
    blank = DecodeResult.blank(1, MOST_STEPS, scored=True)
    slots = stepper.run(Slots.started(keys, state.cache, blank, history=state.history, logits=state.logits))
    return _Row(slots.logits, slots.cache, slots.history), slots.result
