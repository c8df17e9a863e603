"""Shared parts of all data configs: the tokenizer options and the field checks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from transformer.config._checks import ConfigError, check_choice, check_whole

TokenizerKind = Literal["char", "byte", "word", "bpe"]

SMALLEST_BPE = 256 + 3
"""all 256 bytes and the three special tokens (padding, begin, end)"""


def check_share(config: object, field: str) -> float:
    """Return the value of a field. Raise ConfigError if it is not a number between 0 and 1, both excluded."""
    value = getattr(config, field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise ConfigError(f"{field} must be above 0 and below 1, got {value!r}.")
    return value


def check_shares(config: object) -> None:
    """Raise ConfigError if `validation_share` and `test_share` are out of range or leave no training data."""
    validation, test = check_share(config, "validation_share"), check_share(config, "test_share")
    if validation + test >= 1:
        raise ConfigError(
            f"the sum of validation_share ({validation}) and test_share ({test}) must be below 1. Use smaller shares."
        )


def check_path(config: object, field: str) -> None:
    """Raise ConfigError if a field is empty."""
    if not getattr(config, field):
        raise ConfigError(f"{field} must be a file name, got {getattr(config, field)!r}.")


def is_path_field(name: str) -> bool:
    """Return whether a field of a kind of data contains paths of files or folders."""
    return name.endswith(("path", "paths", "dir"))


def check_date(config: object, field: str) -> None:
    """Raise ConfigError if a field is not a date in ISO format."""
    try:
        datetime.fromisoformat(getattr(config, field))
    except (ValueError, TypeError):
        raise ConfigError(f"{field} must be a date such as 2025-01-31, got {getattr(config, field)!r}.") from None


def check_labels(labels: tuple[str, ...], otherwise: str) -> None:
    """Raise ConfigError for a single, empty or repeated label; `otherwise` describes the labels used by default."""
    if len(labels) == 1 or len(set(labels)) < len(labels) or "" in labels:
        raise ConfigError(
            f"labels must be at least two different names, got {', '.join(map(repr, labels))}. Remove them to use "
            f"{otherwise}."
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer options. Source and target of a pair share one vocabulary.

    Raises:
        ConfigError: an unknown kind, or a vocab_size that is too small or does not apply to the kind.
    """

    kind: TokenizerKind = "char"
    """unit of a token:
    char: characters that occur in the data;
    byte: UTF-8 bytes;
    word: words separated by spaces;
    bpe: parts of words, byte-pair encoding learned from the data"""
    vocab_size: int | None = None
    """vocabulary size:
    bpe: size of the learned vocabulary (None: 8192);
    word: keep the most frequent words and map the rest to <unk> (None: keep all)"""

    def __post_init__(self):
        check_choice("tokenizer.kind", self.kind, TokenizerKind.__args__)
        if self.vocab_size is None:
            return
        if self.kind in ("char", "byte"):
            raise ConfigError(
                f"vocab_size ({self.vocab_size}) can't be set for a {self.kind} tokenizer: its vocabulary follows from "
                "the data. Remove it, or use kind word or bpe."
            )
        check_whole(self, "vocab_size", least=SMALLEST_BPE if self.kind == "bpe" else 5)


CHARACTERS = TokenizerConfig(kind="char")
"""default tokenizer for running text"""
WORDS = TokenizerConfig(kind="word")
"""default tokenizer for number words"""
SUBWORDS = TokenizerConfig(kind="bpe")
"""default tokenizer for sentences"""


def shared_rows(config: object) -> tuple[str, int]:
    """Return the name and value of the field whose value divides the number of rows of every batch."""
    field = "batch_size" if getattr(config, "batch_tokens", None) is None else "row_multiple"
    return field, getattr(config, field)
