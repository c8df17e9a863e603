"""Data: what to train on, made ready. `prepare(config)` gives batches, a tokenizer and a fingerprint."""

from transformer.data.configs import (
    DATA,
    PLACES,
    SST2,
    DataConfig,
    JsonLines,
    LabeledText,
    Multi30k,
    NumberWords,
    ParallelText,
    TextFile,
    TinyShakespeare,
    TokenizerConfig,
)
from transformer.data.dataset import Batch, Dataset, Example
from transformer.data.pipeline import check_batch, prepare
from transformer.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "DATA",
    "PLACES",
    "SST2",
    "Batch",
    "DataConfig",
    "Dataset",
    "Example",
    "JsonLines",
    "LabeledText",
    "Multi30k",
    "NumberWords",
    "ParallelText",
    "TextFile",
    "TinyShakespeare",
    "Tokenizer",
    "TokenizerConfig",
    "check_batch",
    "load_tokenizer",
    "prepare",
]
