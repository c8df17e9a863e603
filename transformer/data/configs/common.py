"""What kinds of data have in common: how text becomes tokens, how many rows a step has, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from transformer.config import ConfigError, check_choice

TokenizerKind = Literal["char", "byte", "word", "bpe"]

SMALLEST_BPE = 256 + 3
"""Every byte and the three special tokens (padding, begin, end)."""


def check_whole(config: object, *fields: str, least: int = 1, none: bool = False) -> None:
    """ConfigError for a field that is no whole number of at least `least` (nor None, with `none`)."""
    for field in fields:
        value = getattr(config, field)
        if none and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            allowed = f"a whole number of at least {least}" + (", or None" if none else "")
            raise ConfigError(f"{field} must be {allowed}, got {value!r}.")


def check_share(config: object, field: str) -> None:
    """ConfigError for a field that is no number between 0 and 1."""
    value = getattr(config, field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise ConfigError(f"{field} must be above 0 and below 1, got {value!r}.")


def check_path(config: object, *fields: str) -> None:
    """ConfigError for a field that is empty."""
    for field in fields:
        if not getattr(config, field):
            raise ConfigError(f"{field} must name a file, got {getattr(config, field)!r}.")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes token ids. Source and target of a pair share one vocabulary.

    Raises:
        ConfigError: an unknown kind, or a vocab_size that it has no use for or that is too small.
    """

    kind: TokenizerKind = "char"
    """char: every character of the data. byte: UTF-8. word: what blanks separate. bpe: learned parts, over bytes"""
    vocab_size: int | None = None
    """bpe: the size to train to (None: 8192). word: keep the most frequent, the rest become <unk> (None: keep all)"""

    def __post_init__(self):
        check_choice("tokenizer.kind", self.kind, TokenizerKind.__args__)
        if self.vocab_size is None:
            return
        if self.kind in ("char", "byte"):
            raise ConfigError(
                f"vocab_size ({self.vocab_size}) can't be chosen for a {self.kind} tokenizer: its vocabulary follows "
                "from the data. Leave it out, or take kind word or bpe."
            )
        check_whole(self, "vocab_size", least=SMALLEST_BPE if self.kind == "bpe" else 5)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """What every kind of running text has: examples are windows of `sequence_length` tokens, to be continued."""

    task: ClassVar[str] = "causal_lm"

    sequence_length: int = 256
    """tokens in one training window"""
    batch_size: int = 32
    """windows in one step, over all devices and processes together"""
    eval_batch_size: int = 64
    """windows in one batch of evaluation"""
    tokenizer: TokenizerConfig = TokenizerConfig(kind="char")
    """how text becomes token ids"""

    def __post_init__(self):
        check_whole(self, "sequence_length", "batch_size", "eval_batch_size")


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """What every kind of paired text has: a source to be read and a target to be written.

    Raises:
        ConfigError: a number out of range, a field that another leaves no use for, or no room for packed rows.
    """

    task: ClassVar[str] = "seq2seq"
    group_name: ClassVar[str] = "group"
    """what the groups are in which exact matches are counted"""
    bleu_tokenization: ClassVar[str | None] = "13a"
    """how BLEU parts words, in the names of sacreBLEU; None: translations are compared word for word instead"""

    max_source_length: int | None = None
    """longest source in tokens; longer pairs are left out and counted (None: the longest in the data)"""
    max_target_length: int | None = None
    """longest target in tokens, its end token included; longer pairs are left out and counted (None: the longest)"""
    batch_size: int = 128
    """pairs in one step, over all devices and processes together; not with batch_tokens"""
    batch_tokens: int | None = None
    """tokens in one step, padding included, on the longer side: pairs of like length together (None: batch_size)"""
    buckets: int = 8
    """with batch_tokens: how many lengths are padded to at most; each is compiled once"""
    row_multiple: int = 8
    """with batch_tokens: every batch has a multiple of so many rows, for devices and micro-batches to share"""
    packed_length: int | None = None
    """with batch_tokens: several pairs in one row of so many tokens a side, kept apart (None: one pair in each)"""
    eval_batch_size: int = 250
    """pairs in one batch of evaluation"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size", "buckets", "row_multiple")
        check_whole(self, "batch_tokens", "packed_length", none=True)
        self._check_unused("batch_tokens", "batch_size")
        self._check_unused("packed_length", "buckets")
        if self.packed_length is not None and not self.packed_rows:
            raise ConfigError(
                f"packed_length ({self.packed_length}) needs batch_tokens of at least row_multiple "
                f"({self.row_multiple}) times as many, got {self.batch_tokens}."
            )
        check_whole(self, "max_source_length", none=True)
        check_whole(self, "max_target_length", least=2, none=True)

    def _check_unused(self, field: str, other: str) -> None:
        """Raises ConfigError when `field` is given and leaves no use for `other`, which is changed, too."""
        value, usual = getattr(self, other), type(self).__dataclass_fields__[other].default
        if getattr(self, field) is not None and value != usual:
            raise ConfigError(f"{other} ({value}) does nothing beside {field} ({getattr(self, field)}). Leave one out.")

    @property
    def packed_rows(self) -> int:
        """Rows of a packed batch."""
        return (self.batch_tokens or 0) // self.packed_length // self.row_multiple * self.row_multiple


def shared_rows(config: Any) -> tuple[str, int]:
    """What the rows of every batch of a kind of data are a multiple of: the field that says it, and its value."""
    field = "batch_size" if getattr(config, "batch_tokens", None) is None else "row_multiple"
    return field, getattr(config, field)


@dataclass(frozen=True, kw_only=True)
class LabeledConfig:
    """What every kind of labeled text has: a text to be read, and the class it is of.

    Raises:
        ConfigError: a number out of range, or labels that are one, empty or twice the same.
    """

    task: ClassVar[str] = "classifier"

    labels: tuple[str, ...] = ()
    """the classes as the files write them, by number; none: all that the training file has, in order"""
    max_length: int = 128
    """longest text in tokens, special ones included; of longer ones the end is cut off"""
    batch_size: int = 32
    """texts in one step, over all devices and processes together"""
    eval_batch_size: int = 64
    """texts in one batch of evaluation"""
    tokenizer: TokenizerConfig = TokenizerConfig(kind="bpe")
    """how text becomes token ids, where no pretrained model brings its own"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size")
        check_whole(self, "max_length", least=2)
        if len(self.labels) == 1 or len(set(self.labels)) < len(self.labels) or "" in self.labels:
            raise ConfigError(
                f"labels must be at least two, all different, got {', '.join(map(repr, self.labels))}. Leave them out "
                "to take those of the training file."
            )
