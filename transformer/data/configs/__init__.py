"""What to train on: one frozen dataclass per kind of data, typed and validated at birth. Nothing heavy is imported."""

from __future__ import annotations

from transformer.data.configs.common import LabeledConfig, PairConfig, TextConfig, TokenizerConfig
from transformer.data.configs.labeled import SST2, LabeledText
from transformer.data.configs.pairs import Language, Multi30k, NumberWords, ParallelText
from transformer.data.configs.texts import JsonLines, LocalText, TextFile, TinyShakespeare

__all__ = [
    "DATA",
    "PLACES",
    "SST2",
    "DataConfig",
    "JsonLines",
    "LabeledConfig",
    "LabeledText",
    "Language",
    "LocalText",
    "Multi30k",
    "NumberWords",
    "PairConfig",
    "ParallelText",
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

DataConfig = NumberWords | TinyShakespeare | TextFile | JsonLines | ParallelText | Multi30k | LabeledText | SST2
"""What a recipe's `data` may be."""

DATA: dict[str, type] = {
    config.kind: config
    for config in (NumberWords, TinyShakespeare, TextFile, JsonLines, ParallelText, Multi30k, LabeledText, SST2)
}
"""Every kind of data by the tag it is saved under."""
