"""A time series from a CSV file of the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from transformer.config._checks import nearest
from transformer.data._config import check_path, check_shares
from transformer.data._series import Series, SeriesConfig
from transformer.data.files._texts import read_table

Lines: TypeAlias = Sequence[tuple[int, list[str]]]
"""line number and cells of each line of a file"""


@dataclass(frozen=True, kw_only=True)
class SeriesFile(SeriesConfig):
    """Your own time series: a CSV file (UTF-8) with column names in the first line, then one step per line, in order.

    Raises:
        ConfigError: an empty path, or shares that leave nothing for training.
    """

    kind: ClassVar[str] = "series_file"

    path: str
    """path of the CSV file"""
    validation_share: float = 0.1
    """fraction of the steps, before the test steps, to hold out for evaluation during training"""
    test_share: float = 0.2
    """fraction of the steps, at the end, to hold out for the test"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_shares(self)

    def _selected(self, header: Sequence[str], lines: Lines) -> tuple[str, ...]:
        """Return the names of the columns to read: `columns`, or all columns whose first value is a number."""
        first = lines[0][1] if lines else []
        numeric = [name for name, text in zip(header, first, strict=False) if _number(text) is not None]
        names = self.columns or tuple(numeric)
        if not names:
            raise ValueError(
                f"{self.path} has no numeric column: its first step is {lines[:1]!r:.100}. Check the file."
            )
        for name in names:
            if name not in header:
                raise ValueError(
                    f"{self.path} has no column {name!r}: its first line has {', '.join(header)[:200]}."
                    f"{nearest(name, header)} Use its column names (--data.columns)."
                )
        return names

    def _values(self, header: Sequence[str], lines: Lines, names: Sequence[str]) -> np.ndarray:
        """Return the values of these columns, (steps, columns)."""
        values = np.empty((len(lines), len(names)))
        for channel, name in enumerate(names):
            place = header.index(name)
            for step, (number, row) in enumerate(lines):
                value = _number(row[place])
                if value is None:
                    raise ValueError(
                        f"{self.path}, line {number}: expected a number in column {name}, got {row[place]!r:.40}. Fill "
                        "in missing values, or leave the column out (--data.columns lists the columns to use)."
                    )
                values[step, channel] = value
        return values

    def read(self) -> Series:
        """Return the selected columns; the splits are consecutive: training, validation, test.

        Raises ValueError if a column is missing, or a value is missing or not a number.
        """
        header, lines = read_table(self.path, "Fix the line.")
        header = [name.strip() for name in header]
        if len(set(header)) < len(header):
            raise ValueError(
                f"{self.path} has duplicate column names in its first line: {', '.join(header)[:200]}. Rename one."
            )
        names = self._selected(header, lines)
        values = self._values(header, lines, names)
        count = len(values)
        test, validation = round(count * self.test_share), round(count * self.validation_share)
        # Each split starts where the previous one ends.
        ends = {"train": count - test - validation, "validation": count - test, "test": count}
        starts = dict(zip(ends, (0, *ends.values()), strict=False))
        return Series(values, names, {split: (starts[split], ends[split]) for split in ends})


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) else None
