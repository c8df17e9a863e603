"""ETTh1: the load and oil temperature of an electricity transformer, hour by hour (Zhou et al. 2021, arXiv
2012.07436).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

URL = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/ETTh1.csv"
FILE = tfds.download.checksums.UrlInfo(
    size=tfds.core.utils.Size(2_589_657),
    checksum="f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066",
    filename="ETTh1.csv",
)
"""what the download must be: size in bytes and SHA-256"""

COLUMNS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
"""useful and useless load (high, middle, low), and the temperature of the oil"""

MONTH = 30 * 24
"""hours"""
SPLITS = {"train": (0, 12 * MONTH), "validation": (12 * MONTH, 16 * MONTH), "test": (16 * MONTH, 20 * MONTH)}
"""first hour of each split, and the hour behind its last one; what comes later is not used, as in the literature"""


class ETTh1Builder(tfds.core.GeneratorBasedBuilder):
    """The seven channels, one record a split: 12 months of 30 days to train on, 4 to validate, 4 to test."""

    name = "etth1"
    VERSION = tfds.core.Version("1.0.0")
    url_infos = {URL: FILE}  # noqa: RUF012 - a class attribute of TFDS

    def _info(self) -> tfds.core.DatasetInfo:
        values = tfds.features.Tensor(shape=(None, len(COLUMNS)), dtype=np.float64, doc="(hours, channels)")
        return tfds.core.DatasetInfo(
            builder=self,
            description="Load and oil temperature of an electricity transformer, hourly, from July 2016 on.",
            features=tfds.features.FeaturesDict({"values": values}),
            homepage="https://github.com/zhouhaoyi/ETDataset",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        with Path(dl_manager.download(URL)).open(encoding="utf-8", newline="") as file:
            rows = [[float(row[column]) for column in COLUMNS] for row in csv.DictReader(file)]
        values = np.array(rows)
        return {split: self._generate_examples(split, values[slice(*hours)]) for split, hours in SPLITS.items()}

    def _generate_examples(self, split: str, values: np.ndarray) -> Iterator[tuple[str, dict]]:
        yield split, {"values": values}
