"""Number of UTF-8 bytes that tokens stand for, for losses in bits per byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transformer.data.tokenizers._base import Tokenizer, utf8
from transformer.data.tokenizers._bpe import BPETokenizer
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.data.tokenizers._vocabularies import ByteTokenizer, CharTokenizer

UNKNOWN_BYTES = -1


def token_bytes(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the number of bytes of each token, (V,); special tokens have 0, and unknown tokens `UNKNOWN_BYTES`.

    None: a tokenizer that omits or changes a part of the text, such as spaces or case, so that it depends on the text.
    """
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    first = len(tokenizer.special_tokens)
    match tokenizer:
        case PretrainedTokenizer():
            lengths = tokenizer.byte_level_lengths()
            if lengths is None:
                return None
            for i, length in lengths.items():
                counts[i] = length
        case ByteTokenizer():
            counts[first:] = 1
        case BPETokenizer():  # byte-level: each character of an entry is one byte
            counts[first:] = [len(entry) for entry in tokenizer.vocabulary]
        case CharTokenizer():
            counts[first:] = [len(utf8(entry)) for entry in tokenizer.vocabulary]
        case _:
            return None
    if tokenizer.unk_id is not None:
        counts[tokenizer.unk_id] = UNKNOWN_BYTES
    return counts


def bytes_after_first(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> int:
    """Return the number of UTF-8 bytes of a text without those of its first token, which a model does not predict.

    A start token that the tokenizer added has no bytes. If the first token is part of the text, and the tokenizer may
    change the text, the bytes of the decoded token are subtracted.
    """
    first = int(ids[0])
    total = len(utf8(text))
    counts = token_bytes(tokenizer)
    if counts is not None and counts[first] != UNKNOWN_BYTES:
        return total - int(counts[first])
    return total - len(utf8(tokenizer.decode([first])))
