"""Prompt lookup: propose the tokens that followed an earlier occurrence of the last tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.nn._axes import Array, Int


@dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Speculative decoding without a draft model: proposals come from the text itself (Saxena 2023, "Prompt Lookup
    Decoding", github.com/apoorvumang/prompt-lookup-decoding).

    The last tokens of a row are searched in the prompt and in the text so far. The tokens after the longest match are
    proposed; of several matches as long, the last one counts. This saves steps if a text repeats parts of its prompt,
    as summaries, edits and answers about a document do.

    Raises:
        ConfigError: if `tokens` or `ngram` is no integer of at least 1.
    """

    tokens: int = 4
    """number of tokens to propose per round"""
    ngram: int = 3
    """maximum number of last tokens to search"""

    def __post_init__(self):
        for name in ("tokens", "ngram"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} of a prompt lookup must be an integer of at least 1, got {value!r}.")


def looked_up(text: Int[Array, "B S"], lengths: Int[Array, " B"], lookup: PromptLookup) -> Int[Array, "B Z"]:
    """Return the proposed continuation of each row, (B, Z) for Z = `lookup.tokens`; -1 in rows without a match.

    Entries of `text` (B, S) after the first `lengths` (B,) tokens of a row are not read.
    """
    slots = jnp.arange(text.shape[1])[None, :]  # (1, S)
    last = lengths[:, None] - 1  # (B, 1), index of the last token
    # matched[b, j]: how many tokens that end at index j equal the last tokens of the row, at most `ngram`.
    matched, equal = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, bool)
    for back in range(lookup.ngram):
        suffix = jnp.take_along_axis(text, jnp.maximum(last - back, 0), axis=1)  # (B, 1)
        shifted = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, : text.shape[1]]
        equal &= (shifted == suffix) & (last >= back)
        matched += equal
    matched = jnp.where(slots < last, matched, 0)
    # The longest match; of several the last one, which has the largest index.
    at = jnp.argmax(jnp.where(matched > 0, matched * text.shape[1] + slots, -1), axis=1)[:, None]  # (B, 1)
    # Past the end of the row, its continuation is the proposal itself: the text has the period last - at.
    places = at + 1 + jnp.arange(lookup.tokens)[None, :] % jnp.maximum(last - at, 1)
    found = jnp.take_along_axis(text, jnp.minimum(places, text.shape[1] - 1), axis=1)
    return jnp.where(matched.max(axis=1, keepdims=True) > 0, found, -1)
