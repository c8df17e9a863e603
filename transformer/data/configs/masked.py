"""Kinds of text that a model learns to fill in: some tokens of it are hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.config import ConfigError
from transformer.data.configs.common import SMALLEST_BPE, TokenizerConfig, check_path, check_share, check_whole


@dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    """What every kind of masked text has: texts of which a share of the tokens is to be predicted from the others.

    Raises:
        ConfigError: a number out of range.
    """

    task: ClassVar[str] = "masked_lm"

    max_length: int = 128
    """tokens in one row, special ones included; a longer text becomes several rows"""
    batch_size: int = 32
    """rows in one step, over all devices and processes together"""
    eval_batch_size: int = 64
    """rows in one batch of evaluation"""
    mask_share: float = 0.15
    """share of the tokens that are to be predicted; of these 80 % are hidden, 10 % replaced, 10 % left as they are"""
    tokenizer: TokenizerConfig = TokenizerConfig(kind="bpe")
    """how text becomes token ids, where no pretrained model brings its own"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size")
        check_whole(self, "max_length", least=2)
        check_share(self, "mask_share")
        least = {"bpe": SMALLEST_BPE, "word": 5}.get(self.tokenizer.kind)
        if least is not None and self.tokenizer.vocab_size == least:
            raise ConfigError(
                f"tokenizer.vocab_size must be at least {least + 1} here, with a mask token, got {least}."
            )


@dataclass(frozen=True, kw_only=True)
class MaskedText(MaskedConfig):
    """A text file of one's own (UTF-8), one text a line: a sentence, a paragraph, a document. Empty lines are skipped.

    Raises:
        ConfigError: an empty path, or a number out of range.
    """

    kind: ClassVar[str] = "masked_text"

    path: str
    """the file to train on"""
    validation_path: str | None = None
    """a second file to evaluate on (None: the end of the first)"""
    validation_share: float = 0.1
    """share at the end of the file to evaluate on when there is no validation_path"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_share(self, "validation_share")


@dataclass(frozen=True, kw_only=True)
class MaskedSST2(MaskedConfig):
    """The sentences of SST2Sentences without their labels, in the same splits."""

    kind: ClassVar[str] = "masked_sst2"

    data_dir: str | None = None
    """where TFDS keeps prepared data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """a folder that holds sst2_train.tsv, sst2_dev.tsv and sst2_test.tsv, for a machine without network"""
