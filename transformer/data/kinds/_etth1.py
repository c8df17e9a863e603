"""ETTh1: hourly load and oil temperature of an electricity transformer (Zhou et al. 2021, arXiv 2012.07436)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from transformer.config._checks import nearest
from transformer.data._series import Series, SeriesConfig
from transformer.data.files._tfds import Download, Prepared

FILE = Download(
    url="https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/ETTh1.csv",
    size=2_589_657,
    sha256="f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066",
    filename="ETTh1.csv",
)
"""the source file"""

COLUMNS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
"""column names: high, middle and low load (useful and useless), and oil temperature"""

MONTH = 30 * 24
"""length of a month of 30 days, in hours"""
SPLITS = {"train": (0, 12 * MONTH), "validation": (12 * MONTH, 16 * MONTH), "test": (16 * MONTH, 20 * MONTH)}
"""first hour of each split, and one past its last hour; the remaining hours are unused, as in the literature"""


@dataclass(frozen=True, kw_only=True)
class ETTh1(SeriesConfig):
    """Hourly load and oil temperature of an electricity transformer, 7 channels (Zhou et al. 2021, arXiv 2012.07436),
    with the usual splits: 12 months of 30 days for training, 4 for validation and 4 for the test.
    """

    kind: ClassVar[str] = "etth1"

    data_dir: str | None = None
    """folder of prepared TFDS data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """folder that contains ETTh1.csv, for machines without network access"""

    def read(self) -> Series:
        """Return the channels in `columns`, with the usual splits. Raises ValueError if a channel does not exist."""
        found = PREPARED.records(self.data_dir, self.manual_dir)
        values = np.concatenate([found[split][0]["values"] for split in SPLITS])
        for name in self.columns:
            if name not in COLUMNS:
                raise ValueError(
                    f"{PREPARED.name} has no column {name!r}: expected some of {', '.join(COLUMNS)}."
                    f"{nearest(name, COLUMNS)}"
                )
        columns = self.columns or COLUMNS
        return Series(values[:, [COLUMNS.index(name) for name in columns]], columns, SPLITS)


def _examples(files: Mapping[str, Path]) -> dict[str, Iterator[tuple[str, dict]]]:
    with files[FILE.filename].open(encoding="utf-8", newline="") as file:
        values = np.array([[float(row[column]) for column in COLUMNS] for row in csv.DictReader(file)])
    return {split: iter([(split, {"values": values[slice(*hours)]})]) for split, hours in SPLITS.items()}


PREPARED = Prepared(
    name="etth1",
    description="Load and oil temperature of an electricity transformer, hourly, from July 2016 on.",
    homepage="https://github.com/zhouhaoyi/ETDataset",
    features=lambda features: {
        "values": features.Tensor(shape=(None, len(COLUMNS)), dtype=np.float64, doc="(hours, channels)")
    },
    examples=_examples,
    downloads=(FILE,),
)
"""description of the dataset for TFDS"""
