"""Text normalization of sources and prompts before encoding; its name is saved with the tokenizer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_HYPHENS_AND_COMMAS = re.compile(r"[-\u00ad\u2010-\u2015\u2212,.;!?\s]+")

_BRAZILIAN = {"quatorze": "catorze", "dezesseis": "dezasseis", "dezessete": "dezassete", "dezenove": "dezanove"}


def plain(text: str) -> str:
    return text


def number_words(text: str) -> str:
    """Convert to lower case, without commas and hyphens, with one space: `"Vingt-et-un"` -> `"vingt et un"`."""
    return _HYPHENS_AND_COMMAS.sub(" ", unicodedata.normalize("NFC", text).lower()).strip()


def english_number_words(text: str) -> str:
    """Apply `number_words` without "and", and with "one" for "a": `"A hundred and two"` -> `"one hundred two"`."""
    words = number_words(text).split()
    return " ".join("one" if word == "a" else word for word in words if word != "and")


def portuguese_number_words(text: str) -> str:
    """Apply `number_words` and convert Brazilian to European spelling: `"Dezesseis"` -> `"dezasseis"`."""
    return " ".join(_BRAZILIAN.get(word, word) for word in number_words(text).split())


NORMALIZERS: dict[str, Callable[[str], str]] = {
    "none": plain,
    "number_words": number_words,
    "english_number_words": english_number_words,
    "portuguese_number_words": portuguese_number_words,
}
"""normalization functions by the name that is saved with a tokenizer"""
