"""Labeled texts from a tab-separated file of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from transformer.config._checks import ConfigError, check_choice
from transformer.data._config import check_path, check_share
from transformer.data._labels import Labeled, LabeledConfig, hold_out, numbered
from transformer.data.files._texts import cut, read_labeled


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
    """path of a second file for evaluation (None: hold out a part of the training file)"""
    validation_share: float = 0.1
    """without validation_path: fraction of the training file to hold out for evaluation"""
    hold_out: Literal["by_class", "end"] = "by_class"
    """without validation_path: by_class: the share of each class, chosen by a hash of the text; end: the end of the
    file"""
    text_column: str = "sentence"
    """name of the text column"""
    label_column: str = "label"
    """name of the label column"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_share(self, "validation_share")
        check_choice("hold_out", self.hold_out, ("by_class", "end"))
        if not self.text_column or not self.label_column or self.text_column == self.label_column:
            raise ConfigError(
                f"text_column and label_column must be two different columns, got {self.text_column!r} and "
                f"{self.label_column!r}."
            )

    def read(self) -> Labeled:
        """Return the texts; without validation_path, a part is held out (`hold_out`). ValueError for a single label."""
        columns = self.text_column, self.label_column
        train = read_labeled(self.path, *columns)
        if self.validation_path is not None:
            held_out = read_labeled(self.validation_path, *columns)
        else:
            train, held_out = self._split(train)
        labels = self.labels or tuple(sorted({label for _, label in train}))
        if len(labels) < 2:
            raise ValueError(f"{self.path} has only the label {labels[0]!r}: expected at least two.")
        splits = {"train": (self.path, train), "validation": (self.validation_path or self.path, held_out)}
        return Labeled({split: numbered(*rows, labels, labels) for split, rows in splits.items()}, labels)

    def _split(self, rows: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Return the rows for training and the held-out ones, each in the order of the file."""
        end = cut(len(rows), self.validation_share, self.path, "texts")
        if self.hold_out == "end":
            return rows[:end], rows[end:]
        chosen = hold_out([text for text, _ in rows], [label for _, label in rows], self.validation_share)
        train = [row for row, is_held_out in zip(rows, chosen, strict=True) if not is_held_out]
        return train, [row for row, is_held_out in zip(rows, chosen, strict=True) if is_held_out]
