"""What to train on: one frozen dataclass per kind of data, typed and validated at birth. Nothing heavy is imported."""

from __future__ import annotations

from transformer.data.configs.common import LabeledConfig, PairConfig, TextConfig, TokenizerConfig
from transformer.data.configs.labeled import SST2, LabeledText, SST2Sentences
from transformer.data.configs.masked import MaskedConfig, MaskedSST2, MaskedText
from transformer.data.configs.pairs import Language, Multi30k, NumberWords, ParallelText, TFDSTranslation
from transformer.data.configs.texts import JsonLines, LocalText, TextFile, TinyShakespeare
from transformer.data.configs.vectors import Digits, ETTh1, ImageConfig, ImageFile, SeriesConfig, SeriesFile

__all__ = [
    "DATA",
    "PLACES",
    "SST2",
    "DataConfig",
    "Digits",
    "ETTh1",
    "ImageConfig",
    "ImageFile",
    "JsonLines",
    "LabeledConfig",
    "LabeledText",
    "Language",
    "LocalText",
    "MaskedConfig",
    "MaskedSST2",
    "MaskedText",
    "Multi30k",
    "NumberWords",
    "PairConfig",
    "ParallelText",
    "SST2Sentences",
    "SeriesConfig",
    "SeriesFile",
    "TFDSTranslation",
    "TextConfig",
    "TextFile",
    "TinyShakespeare",
    "TokenizerConfig",
]

PLACES = frozenset(
    {"data_dir", "manual_dir", "path", "source_path", "target_path"}
    | {"validation_path", "validation_source_path", "validation_target_path"}
)
"""Fields that say where bytes lie. They may change between runs: a fingerprint says what the bytes are."""

DataConfig = (
    NumberWords
    | TinyShakespeare
    | TextFile
    | JsonLines
    | ParallelText
    | Multi30k
    | TFDSTranslation
    | LabeledText
    | SST2
    | SST2Sentences
    | MaskedText
    | MaskedSST2
    | ETTh1
    | SeriesFile
    | Digits
    | ImageFile
)
"""What a recipe's `data` may be."""

DATA: dict[str, type] = {config.kind: config for config in DataConfig.__args__}
"""Every kind of data by the tag it is saved under."""
