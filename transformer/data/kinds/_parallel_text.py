"""Sentence pairs from text files of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.config._checks import ConfigError
from transformer.data._config import SUBWORDS, TokenizerConfig, check_path, check_share
from transformer.data._dataset import Example
from transformer.data._pairs import PairConfig, Pairs
from transformer.data.files._texts import cut, read_pairs


@dataclass(frozen=True, kw_only=True)
class ParallelText(PairConfig):
    """Your own sentence pairs: two files with the same number of lines, or one file with source, tab, target per line.

    Raises:
        ConfigError: an empty path, a share out of range, or validation files that are not in the format of the
            training files.
    """

    kind: ClassVar[str] = "parallel_text"

    source_path: str
    """path of the source file, one source per line; without target_path, each line is source, tab, target"""
    target_path: str | None = None
    """path of the target file, one target per line (None: source_path contains the targets)"""
    validation_source_path: str | None = None
    """path of the validation sources, in the same format (None: hold out the end of the training pairs)"""
    validation_target_path: str | None = None
    """path of the validation targets; required if target_path and validation_source_path are set"""
    validation_share: float = 0.1
    """without validation_source_path: fraction of the pairs, at the end, to hold out for evaluation"""
    tokenizer: TokenizerConfig = SUBWORDS
    """tokenizer"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "source_path")
        check_share(self, "validation_share")
        wanted = self.target_path is not None and self.validation_source_path is not None
        if wanted != (self.validation_target_path is not None):
            raise ConfigError(
                f"validation_target_path is {self.validation_target_path!r}, but target_path is {self.target_path!r} "
                f"and validation_source_path {self.validation_source_path!r}. Use validation files in the format of "
                "the training files: two files each, or one tab-separated file each."
            )

    def read(self) -> Pairs:
        """Return the pairs; without validation_source_path, the last ones are held out."""
        train, skipped = read_pairs(self.source_path, self.target_path)
        if self.validation_source_path is not None:
            paths = self.validation_source_path, self.validation_target_path
            held_out, more = read_pairs(*paths)
            skipped += more
        else:
            option = "--data.validation-source-path"
            end = cut(len(train), self.validation_share, self.source_path, "pairs", option)
            train, held_out = train[:end], train[end:]
        splits = {"train": train, "validation": held_out}
        return Pairs({split: [Example(*pair) for pair in pairs] for split, pairs in splits.items()}, skipped=skipped)
