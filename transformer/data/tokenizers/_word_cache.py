"""Encode long texts with a learned BPE vocabulary: most words occur again and again, and their ids are remembered."""

from __future__ import annotations

import re
from itertools import chain

import numpy as np

from transformer.data.tokenizers._base import utf8
from transformer.data.tokenizers._bpe import BPETokenizer

_MOST = 2**18
"""remembered words, about 40 MB; then all are forgotten"""
_LONGEST = 32
"""characters of a word that is remembered: longer ones, as in languages without spaces, hardly occur again"""
_SPACE = r"[^\S\x1c-\x1f]"
"""white space in the pattern of the library; Python also counts four control characters"""
_WORDS = re.compile(rf"{_SPACE}*(?:\S|[\x1c-\x1f])+|{_SPACE}+")


class WordCache:
    """The ids of `BPETokenizer.encode`, several times faster on long texts.

    The pattern that splits a text before byte-pair encoding (that of GPT-2) always splits where white space follows
    something else, and never looks back over such a place. White space and the characters after it can therefore be
    encoded alone.
    """

    def __init__(self, tokenizer: BPETokenizer):
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text. Raises ValueError for a lone surrogate."""
        utf8(text)
        words = _WORDS.findall(text)
        if new := list(set(words).difference(self._ids)):
            if len(self._ids) + len(new) > _MOST:
                self._ids.clear()
                new = list(set(words))
            self._ids.update(zip(new, self._tokenizer.encode_all(new), strict=True))
        ids = np.fromiter(chain.from_iterable(map(self._ids.__getitem__, words)), np.int32)
        for word in new:
            if len(word) > _LONGEST:
                del self._ids[word]
        return ids
