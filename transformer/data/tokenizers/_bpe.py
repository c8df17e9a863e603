"""Byte-pair encoding (BPE), a tokenizer with a learned vocabulary (Sennrich et al. 2016, arXiv 1508.07909)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from transformer.data.tokenizers._base import VISIBLE, Tokenizer, check_vocabulary, listed, utf8
from transformer.data.tokenizers._byte_level import byte_level_bytes

if TYPE_CHECKING:
    import tokenizers


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding: encodes any text; frequent parts of words become one token.

    Training starts with the 256 bytes as vocabulary. It repeatedly merges the most frequent pair of adjacent tokens
    within words into a new token, until the vocabulary has the requested size. Encoding applies the merges to a text in
    the order in which they were learned.

    The `tokenizers` library learns and applies the merges. It does not know the special tokens, so that it can't find
    any in a text. Saved merges are checked before the library reads them, because it panics on invalid ones.
    """

    kind = "bpe"

    def __init__(
        self, vocabulary: list[str], merges: list[list[str]], normalization: str = "none", masked: bool = False
    ):
        super().__init__(vocabulary, normalization, masked=masked)
        check_vocabulary(vocabulary)
        self.merges = _checked_merges(merges, vocabulary)
        self._library = _byte_level(vocabulary, self.merges)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, normalization: str = "none", masked: bool = False
    ) -> BPETokenizer:
        """Learn merges until there are `vocab_size` ids, including special tokens, or no more pairs to merge."""
        import tokenizers

        library = _byte_level()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - 3 - masked,  # without padding, begin, end and mask token
            # All 256 bytes, in the printable form that the library uses, so that any text can be encoded.
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        library.train_from_iterator(texts, trainer)
        model = json.loads(library.to_str())["model"]
        vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return cls(vocabulary, [list(merge) for merge in model["merges"]], normalization, masked)

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            utf8(text)
        # The library counts ids from 0; the ids of this tokenizer start after the special tokens.
        first = len(self.special_tokens)
        found = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [[first + i for i in text.ids] for text in found]

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_all([self.normalize(text) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not valid UTF-8 become U+FFFD."""
        return self._library.decode(list(self._entries(ids)), skip_special_tokens=False)

    def token_bytes(self, i: int) -> bytes | None:
        """Return the bytes of a token; None: a special token."""
        return b"".join(byte_level_bytes(self.vocabulary[entry]) for entry in self._entries([i])) or None

    def state(self) -> dict[str, Any]:
        return super().state() | {"merges": [" ".join(merge) for merge in self.merges]}

    def _label(self, entry: int) -> str:
        return self._library.decode([entry], skip_special_tokens=False).translate(VISIBLE)


def _checked_merges(merges: list[list[str]], vocabulary: list[str]) -> list[tuple[str, str]]:
    """Return the merges as tuples. Raise ValueError unless both parts of each merge and its result are tokens."""
    known = set(vocabulary)
    for number, merge in enumerate(merges):
        if len(merge) != 2:
            raise ValueError(f"merge {number} must have two parts, got {merge!r}.")
        for part in (*merge, "".join(merge)):
            if part not in known:
                raise ValueError(
                    f"merge {number} ({' '.join(merge)!r}) has or creates {part!r}, which is not in the vocabulary."
                )
    return [(left, right) for left, right in merges]


def _byte_level(
    vocabulary: list[str] | None = None, merges: list[tuple[str, str]] | None = None
) -> tokenizers.Tokenizer:
    """Return a pipeline of the library: text -> words -> bytes -> merges, without normalization and special tokens."""
    import tokenizers

    if vocabulary is None:
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
    else:
        if missing := sorted(set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary)):
            raise ValueError(f"a bpe vocabulary must contain all 256 bytes, but {listed(missing, 'byte', 3)} missing.")
        try:
            model = tokenizers.models.BPE(vocab={entry: i for i, entry in enumerate(vocabulary)}, merges=merges)
        except BaseException as error:  # the library's PanicException is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise ValueError(f"the tokenizers library rejects these merges: {error}.") from error
        library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library
