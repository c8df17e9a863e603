"""Training data. `prepare(config)` returns a dataset with batches, a tokenizer and a fingerprint."""

from transformer.data.config import DataKind, TokenizerConfig
from transformer.data.dataset import Batch, Dataset, Example, padding
from transformer.data.kinds import (
    DATA,
    PLACES,
    SST2,
    DataConfig,
    Digits,
    ETTh1,
    ImageFile,
    JsonLines,
    LabeledText,
    MaskedSST2,
    MaskedText,
    Multi30k,
    NumberWords,
    ParallelText,
    SeriesFile,
    SST2Sentences,
    TextFile,
    TFDSTranslation,
    TinyShakespeare,
)
from transformer.data.pipeline import check_batch, prepare
from transformer.data.tokenizer import Tokenizer
from transformer.data.tokenizer_kinds import load_tokenizer

__all__ = [
    "DATA",
    "PLACES",
    "SST2",
    "Batch",
    "DataConfig",
    "DataKind",
    "Dataset",
    "Digits",
    "ETTh1",
    "Example",
    "ImageFile",
    "JsonLines",
    "LabeledText",
    "MaskedSST2",
    "MaskedText",
    "Multi30k",
    "NumberWords",
    "ParallelText",
    "SST2Sentences",
    "SeriesFile",
    "TFDSTranslation",
    "TextFile",
    "TinyShakespeare",
    "Tokenizer",
    "TokenizerConfig",
    "check_batch",
    "load_tokenizer",
    "padding",
    "prepare",
]
