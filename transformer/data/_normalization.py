"""What a source or prompt goes through before it is encoded, by a name that is saved with the tokenizer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_HYPHENS_AND_COMMAS = re.compile(r"[-\u00ad\u2010-\u2015\u2212,.;!?\s]+")

_BRAZILIAN = {
    "quatorze": "catorze",
    "dezesseis": "dezasseis",
    "dezessete": "dezassete",
    "dezenove": "dezanove",
}


def plain(text: str) -> str:
    """The text itself."""
    return text


def number_words(text: str) -> str:
    """Lower case, one blank between words, no commas or hyphens: `"Vingt-et-un"` -> `"vingt et un"`."""
    return _HYPHENS_AND_COMMAS.sub(" ", unicodedata.normalize("NFC", text).lower()).strip()


def english_number_words(text: str) -> str:
    """The same without "and", and with "one" for "a": `"A hundred and forty-two"` -> `"one hundred forty two"`."""
    words = number_words(text).split()
    return " ".join("one" if word == "a" else word for word in words if word != "and")


def portuguese_number_words(text: str) -> str:
    """The same with Brazilian spellings taken to European ones: `"Dezesseis"` -> `"dezasseis"`."""
    return " ".join(_BRAZILIAN.get(word, word) for word in number_words(text).split())


NORMALIZERS: dict[str, Callable[[str], str]] = {
    "none": plain,
    "number_words": number_words,
    "english_number_words": english_number_words,
    "portuguese_number_words": portuguese_number_words,
}
"""Every normalization by the name a tokenizer is saved with."""
