"""Text to token ids and back: what every kind of tokenizer has; saved as readable JSON."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformer.config._checks import nearest
from transformer.data._normalization import NORMALIZERS

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
"""names in the order of their ids; the first three are always there"""
TOKENIZER_FILE = "tokenizer.json"
FORMAT = 1
"""version of that file"""

VISIBLE = str.maketrans({" ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r"})
"""how blanks and line ends are shown"""


class Tokenizer(ABC):
    """One vocabulary: ids of special tokens first (`pad_id` 0, `bos_id` 1, `eos_id` 2, then `unk_id` where there is an
    unknown and `mask_id` where tokens are to be hidden, else None), then text.

    Special tokens have ids but no spelling: `encode("<eos>")` gives the ids of these five characters, never the end
    token, so that no text of a user can end a sequence.

    Raises:
        ValueError: an unknown normalization.
    """

    kind: ClassVar[str]
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    unk_id: int | None = None
    mask_id: int | None = None

    def __init__(
        self, vocabulary: list[str], normalization: str = "none", *, unknown: bool = False, masked: bool = False
    ):
        if normalization not in NORMALIZERS:
            raise ValueError(
                f"normalization must be one of {', '.join(NORMALIZERS)}, got {normalization!r}."
                f"{nearest(normalization, NORMALIZERS)}"
            )
        self.normalization = normalization
        self.vocabulary = vocabulary
        self.unk_id = 3 if unknown else None
        self.mask_id = 3 + unknown if masked else None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names of the special tokens, by id."""
        ids = 0, 1, 2, self.unk_id, self.mask_id
        return tuple(name for name, i in zip(SPECIAL_TOKENS, ids, strict=True) if i is not None)

    @property
    def text_ids(self) -> list[int]:
        """Ids that stand for text, rising: all but those of special tokens."""
        return list(range(len(self.special_tokens), self.vocab_size))

    @property
    def begin_id(self) -> int | None:
        """The token that a target of an encoder-decoder begins with."""
        return self.bos_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self.special_tokens) + len(self.vocabulary)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text; no special token is added or recognized. ValueError names what the vocabulary lacks."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens are left out. ValueError if an id is outside the vocabulary."""

    def normalize(self, text: str) -> str:
        """A source or prompt as the model was trained to read it (for number words: case, commas, hyphens, "and")."""
        return NORMALIZERS[self.normalization](text)

    def encode_source(self, text: str) -> list[int]:
        """`encode(normalize(text))`: what every source and prompt goes through, in training and afterwards."""
        return self.encode(self.normalize(text))

    def unknown_parts(self, text: str) -> list[str]:
        """The words or characters of a text, in order, that `encode` replaces by the unknown token or leaves out."""
        return []

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, by several threads where the kind of tokenizer can."""
        return [self.encode(text) for text in texts]

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_source` of each, likewise."""
        return [self.encode_source(text) for text in texts]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """One label per id, for a picture: blanks and line ends made visible, special tokens by name."""
        special = self.special_tokens
        return [special[i] if i < len(special) else self._label(i - len(special)) for i in self._checked(ids)]

    def save(self, directory: str | os.PathLike) -> None:
        """Writes `tokenizer.json` into a directory, which is made when missing."""
        path = Path(directory) / TOKENIZER_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.state(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def save_alone(self, directory: str | os.PathLike) -> None:
        """Writes all that `load_tokenizer` needs into a directory that holds nothing else."""
        self.save(directory)

    def state(self) -> dict[str, Any]:
        """All that makes this tokenizer, as JSON values."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "normalization": self.normalization,
            "special_tokens": list(self.special_tokens),
            "vocabulary": self.vocabulary,
        }

    def _label(self, entry: int) -> str:
        return self.vocabulary[entry].translate(VISIBLE)

    def _checked(self, ids: Iterable[int]) -> Iterator[int]:
        for place, i in enumerate(ids):
            i = int(i)
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"token id {i} at position {place} is outside the vocabulary: expected 0 to {self.vocab_size - 1}. "
                    "Use the tokenizer the model was trained with."
                )
            yield i

    def _entries(self, ids: Iterable[int]) -> Iterator[int]:
        """Places in the vocabulary of those ids that are text."""
        first = len(self.special_tokens)
        return (i - first for i in self._checked(ids) if i >= first)


def utf8(text: str) -> bytes:
    """The bytes of a text. ValueError for a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate {text[error.start]!r} at character {error.start}, which is no valid "
            "Unicode. Read the text with its right encoding."
        ) from None


def listed(entries: list[str], noun: str, limit: int = 10) -> str:
    """Entries of a vocabulary for an error: characters 'a', 'b' and 3 more."""
    shown = ", ".join(repr(entry) for entry in entries[:limit])
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return f"{noun}{'s' if len(entries) > 1 else ''} {shown}{more}"


def check_vocabulary(vocabulary: list[str]) -> None:
    """Raises ValueError for a vocabulary that is empty or holds something twice."""
    if not vocabulary:
        raise ValueError("the vocabulary is empty. Give a text with something in it.")
    if twice := [entry for entry, count in Counter(vocabulary).items() if count > 1]:
        raise ValueError(f"the vocabulary holds the {listed(twice, 'token', 5)} more than once.")
