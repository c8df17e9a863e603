"""Tokenizers of characters, words and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformer.config._checks import nearest
from transformer.data.tokenizers._base import VISIBLE, Tokenizer, check_vocabulary, listed, utf8


class CharTokenizer(Tokenizer):
    """A tokenizer with one token per character. A character outside the vocabulary is an error."""

    kind = "char"

    def __init__(self, vocabulary: list[str], normalization: str = "none", masked: bool = False):
        super().__init__(vocabulary, normalization, masked=masked)
        check_vocabulary(vocabulary)
        if wrong := [entry for entry in vocabulary if len(entry) != 1]:
            raise ValueError(f"a char vocabulary must contain single characters, got {wrong[0]!r}.")
        self._ids = {entry: len(self.special_tokens) + i for i, entry in enumerate(vocabulary)}

    def encode(self, text: str) -> list[int]:
        """Return one id per character. Raises ValueError for characters outside the vocabulary."""
        try:
            return [self._ids[character] for character in text]
        except KeyError:
            missing = sorted({character for character in text if character not in self._ids})
            raise ValueError(
                f"the text has {listed(missing, 'character')} that this tokenizer does not know. It knows "
                f"{listed(self.vocabulary, 'character', 100)}."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Join the characters of ids."""
        return "".join(self.vocabulary[i] for i in self._entries(ids))


class WordTokenizer(Tokenizer):
    """A tokenizer with one token per word; words are separated by spaces.

    A word outside the vocabulary becomes the unknown token or, without `unknown`, is an error.
    """

    kind = "word"

    def __init__(self, vocabulary: list[str], normalization: str = "none", unknown: bool = False, masked: bool = False):
        super().__init__(vocabulary, normalization, unknown=unknown, masked=masked)
        check_vocabulary(vocabulary)
        if wrong := [entry for entry in vocabulary if entry.split() != [entry]]:
            raise ValueError(f"a word vocabulary must contain words without spaces, got {wrong[0]!r}.")
        self._ids = {entry: len(self.special_tokens) + i for i, entry in enumerate(vocabulary)}

    def encode(self, text: str) -> list[int]:
        """Return one id per word. Without an unknown token, raises ValueError for words outside the vocabulary."""
        words = text.split()
        if self.unk_id is not None:
            return [self._ids.get(word, self.unk_id) for word in words]
        if missing := sorted({word for word in words if word not in self._ids}):
            hints = "".join(nearest(word, self.vocabulary) for word in missing[:1])
            raise ValueError(
                f"the text has {listed(missing, 'word')} that this tokenizer does not know.{hints} "
                f"It knows {len(self.vocabulary)} words."
            )
        return [self._ids[word] for word in words]

    def unknown_parts(self, text: str) -> list[str]:
        """Return the words outside the vocabulary; empty without an unknown token, because `encode` rejects them."""
        return [] if self.unk_id is None else [word for word in text.split() if word not in self._ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Join the words of ids with spaces."""
        return " ".join(self.vocabulary[i] for i in self._entries(ids))


class ByteTokenizer(Tokenizer):
    """A tokenizer with one token per UTF-8 byte: it encodes any text, but sequences are long."""

    kind = "byte"

    def __init__(self, normalization: str = "none", masked: bool = False):
        super().__init__([f"{byte:02x}" for byte in range(256)], normalization, masked=masked)

    def encode(self, text: str) -> list[int]:
        first = len(self.special_tokens)
        return [first + byte for byte in utf8(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the bytes; bytes that are not valid UTF-8 become U+FFFD."""
        return bytes(self._entries(ids)).decode("utf-8", errors="replace")

    def token_bytes(self, i: int) -> bytes | None:
        """Return the byte of a token; None: a special token."""
        return bytes(self._entries([i])) or None

    def state(self) -> dict[str, Any]:
        """Return the state of this tokenizer as JSON values, without the vocabulary, which is always the same."""
        return {key: value for key, value in super().state().items() if key != "vocabulary"}

    def _label(self, entry: int) -> str:
        character = chr(entry)
        return character.translate(VISIBLE) if entry < 127 and character.isprintable() else f"{entry:02x}"
