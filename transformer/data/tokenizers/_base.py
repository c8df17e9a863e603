"""Base class of tokenizers, which convert text to token ids and back, and are saved as readable JSON."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from transformer.config._checks import nearest, shortened
from transformer.config._local_paths import local_path
from transformer.config._replaced_files import replace_file
from transformer.data.tokenizers._normalization import NORMALIZERS

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
"""names of special tokens, in the order of their ids; every tokenizer has the first three"""
TOKENIZER_FILE = "tokenizer.json"
FORMAT = 1
"""version of the format of tokenizer.json"""

VISIBLE = str.maketrans({" ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r"})
"""visible forms of spaces, tabs and line endings"""


class Tokenizer(ABC):
    """Base class of tokenizers. The first ids are special tokens, the others are the vocabulary.

    Special tokens are `pad_id` 0 (padding), `bos_id` 1 (begin), `eos_id` 2 (end), then `unk_id` (unknown) and `mask_id`
    (mask) if the tokenizer has them (otherwise None). They have ids, but no spelling: `encode("<eos>")` returns the ids
    of these five characters, never the end token, so that no user text can end a sequence.

    Raises:
        ValueError: an unknown normalization.
    """

    kind: ClassVar[str]
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    unk_id: int | None = None
    mask_id: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    """side at which a text is cut that has too many tokens"""

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
        """Names of the special tokens, sorted by id."""
        ids = 0, 1, 2, self.unk_id, self.mask_id
        return tuple(name for name, i in zip(SPECIAL_TOKENS, ids, strict=True) if i is not None)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `decode` omits."""
        return frozenset(range(len(self.special_tokens)))

    @property
    def text_ids(self) -> list[int]:
        """Sorted ids that represent text: all ids except special tokens."""
        return list(range(len(self.special_tokens), self.vocab_size))

    @property
    def begin_id(self) -> int | None:
        """Id of the first token that the decoder of an encoder-decoder reads."""
        return self.bos_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special tokens."""
        return len(self.special_tokens) + len(self.vocabulary)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens are neither added nor recognized. Raises ValueError for unknown
        parts.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens. Raises ValueError for an id outside the vocabulary."""

    def normalize(self, text: str) -> str:
        """Normalize a source or prompt as in training (for number words: case, commas, hyphens, "and")."""
        return NORMALIZERS[self.normalization](text)

    def encode_source(self, text: str) -> list[int]:
        """Return `encode(normalize(text))`: the ids of a source or prompt, in training and inference."""
        return self.encode(self.normalize(text))

    def encode_prompt(self, text: str, *, parse_special: bool = True, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text that a model continues.

        In contrast to `encode_source`, the name of a special token in the text is that token, if the tokenizer spells
        its special tokens, as those of pretrained models do.

        Args:
            text: the prompt.
            parse_special: False: names of special tokens are text.
            add_special_tokens: add the special tokens used in training, such as a start token.

        Raises:
            ValueError: the tokenizer can't encode the text.
        """
        return self.encode_source(text)

    def unknown_parts(self, text: str) -> list[str]:
        """Return the words or characters of a text, in order, that `encode` omits or replaces by the unknown token."""
        return []

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded in parallel threads if the tokenizer supports it."""
        return [self.encode(text) for text in texts]

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each source, encoded in parallel threads if the tokenizer supports it."""
        return [self.encode_source(text) for text in texts]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return one label per id for figures, with visible spaces and line endings, and names of special tokens."""
        special = self.special_tokens
        return [special[i] if i < len(special) else self._label(i - len(special)) for i in self._checked(ids)]

    def token_bytes(self, i: int) -> bytes | None:
        """Return the UTF-8 bytes of a token that can be a part of a character.

        None: a special token, or a token that always is whole characters, which `decode` returns.
        """
        return None

    def save(self, directory: str | os.PathLike) -> None:
        """Write `tokenizer.json` into a directory, which is created if missing."""
        path = local_path(directory, "directory") / TOKENIZER_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(self.state(), ensure_ascii=False, indent=1) + "\n")

    def save_alone(self, directory: str | os.PathLike) -> None:
        """Write all files that `load_tokenizer` needs into a directory that has no model."""
        self.save(directory)

    def state(self) -> dict[str, Any]:
        """Return the complete state of this tokenizer as JSON values."""
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
                    "Use the tokenizer that the model was trained with."
                )
            yield i

    def _entries(self, ids: Iterable[int]) -> Iterator[int]:
        """Yield the indices into the vocabulary of all ids except special tokens."""
        first = len(self.special_tokens)
        return (i - first for i in self._checked(ids) if i >= first)


def utf8(text: str) -> bytes:
    """Return the UTF-8 bytes of a text. Raises ValueError for a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate {text[error.start]!r} at character {error.start}, which is not valid "
            "Unicode. Read the text with its correct encoding."
        ) from None


def listed(entries: list[str], noun: str, limit: int = 10) -> str:
    """Format vocabulary entries for an error message: characters 'a', 'b' and 3 more."""
    return f"{noun}{'s' if len(entries) > 1 else ''} {shortened([repr(entry) for entry in entries], limit)}"


def check_vocabulary(vocabulary: list[str]) -> None:
    """Raise ValueError if a vocabulary is empty or has duplicates."""
    if not vocabulary:
        raise ValueError("the vocabulary is empty. Use a text that is not empty.")
    if twice := [entry for entry, count in Counter(vocabulary).items() if count > 1]:
        raise ValueError(f"the vocabulary contains the {listed(twice, 'token', 5)} more than once. Remove duplicates.")
