"""Refuse a text with too many tokens before all of it is encoded, which takes seconds and gigabytes for megabytes."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.data.tokenizers._base import Tokenizer

USUAL_CHARACTERS = 8
"""characters per token that a usual text does not exceed: up to this length, a text is not checked"""
MOST_PART = 2**16
"""maximum number of characters that are encoded together, which takes some 50 ms"""


class TooManyTokensError(ValueError):
    """A text has more tokens than a model can read."""


def check_length(tokenizer: Tokenizer, texts: Sequence[str], most: int, usual: int = USUAL_CHARACTERS) -> None:
    """Check that texts have at most `most` tokens together, about: count the tokens of parts until they are too many.

    A part costs the same whatever follows it, so a text of any length is refused (TooManyTokensError) after about
    `most` tokens. A cut can divide a token, and so the count of the parts may exceed `most` by a twentieth: the caller
    checks what passes. Up to `usual` characters per token, or `MOST_PART` characters, nothing is checked.
    """
    if sum(map(len, texts)) <= max(usual * most, MOST_PART):
        return
    room = most + most // 20 + 64 + len(texts)
    for text in texts:
        for start in range(0, len(text), MOST_PART):
            room -= len(tokenizer.encode_all([text[start : start + MOST_PART]])[0])
            if room < 0:
                raise TooManyTokensError(
                    f"the text has {sum(map(len, texts))} characters and more than {most} tokens, the maximum. Shorten "
                    f"it."
                )
