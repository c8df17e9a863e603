"""From a kind of data to its texts by split: prepared by TFDS, or read from one's own files."""

from __future__ import annotations

from transformer.data.configs import (
    SST2,
    DataConfig,
    JsonLines,
    LabeledText,
    Multi30k,
    NumberWords,
    ParallelText,
    TextFile,
    TinyShakespeare,
)
from transformer.data.sources.labeled import Labeled, labeled_text, sst2
from transformer.data.sources.pairs import Pairs, multi30k, number_words, parallel_text
from transformer.data.sources.texts import Documents, local_text, tiny_shakespeare

__all__ = ["Documents", "Labeled", "Pairs", "read"]


def read(config: DataConfig) -> Documents | Pairs | Labeled:
    """The texts of any kind of data. FileNotFoundError, ValueError (bad input) or OSError (no network, no room)."""
    match config:
        case NumberWords():
            return number_words(config)
        case TinyShakespeare():
            return tiny_shakespeare(config)
        case TextFile() | JsonLines():
            return local_text(config)
        case Multi30k():
            return multi30k(config)
        case ParallelText():
            return parallel_text(config)
        case LabeledText():
            return labeled_text(config)
        case SST2():
            return sst2(config)
    raise ValueError(f"data must be one of the kinds in transformer.data.DATA, got {type(config).__name__}.")
