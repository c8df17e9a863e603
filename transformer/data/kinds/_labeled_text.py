"""Labeled texts from a tab-separated file of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.config._checks import ConfigError
from transformer.data._config import check_path, check_share
from transformer.data._labeled import Labeled, LabeledConfig, numbered
from transformer.data._local_files import cut, read_labeled


@dataclass(frozen=True, kw_only=True)
class LabeledText(LabeledConfig):
    """Your own labeled texts: a tab-separated file (UTF-8) with column names in the first line.

    Raises:
        ConfigError: an empty path, a share out of range, or the same column for text and label.
    """

    kind: ClassVar[str] = "labeled_text"

    path: str
    """path of the training file"""
    validation_path: str | None = None
    """path of a second file for evaluation (None: hold out the end of the training file)"""
    validation_share: float = 0.1
    """without validation_path: fraction of the training file, at its end, to hold out for evaluation"""
    text_column: str = "sentence"
    """name of the text column"""
    label_column: str = "label"
    """name of the label column"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_share(self, "validation_share")
        if not self.text_column or not self.label_column or self.text_column == self.label_column:
            raise ConfigError(
                f"text_column and label_column must be two different columns, got {self.text_column!r} and "
                f"{self.label_column!r}."
            )

    def read(self) -> Labeled:
        """Return the texts; without validation_path, the last ones are held out.

        Raises:
            ValueError: there is only one label.
        """
        columns = self.text_column, self.label_column
        train = read_labeled(self.path, *columns)
        if self.validation_path is not None:
            held_out = read_labeled(self.validation_path, *columns)
        else:
            end = cut(len(train), self.validation_share, self.path, "texts")
            train, held_out = train[:end], train[end:]
        labels = self.labels or tuple(sorted({label for _, label in train}))
        if len(labels) < 2:
            raise ValueError(f"{self.path} has only the label {labels[0]!r}: expected at least two.")
        splits = {"train": (self.path, train), "validation": (self.validation_path or self.path, held_out)}
        return Labeled({split: numbered(*rows, labels, labels) for split, rows in splits.items()}, labels)
