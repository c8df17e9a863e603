"""SST-2, whole sentences: movie reviews, negative or positive (Socher et al. 2013), with labels for the test split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

_URL = "https://raw.githubusercontent.com/clairett/pytorch-sentiment-classification/master/data/SST2"
_FILES = {
    "train": ("train.tsv", 720_259, "ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920"),
    "validation": ("dev.tsv", 92_057, "eddea6b39e601dd4e7a672b53cc40fdf6019fa80522f351206c24340ca5d9359"),
    "test": ("test.tsv", 188_749, "831169c7e2e429d6026e1bdbb542f33b636e3e596caad9602ebc953c205928b7"),
}

URLS = {split: f"{_URL}/{name}" for split, (name, _, _) in _FILES.items()}
"""address of a split's file"""
DOWNLOADS = {
    URLS[split]: tfds.download.checksums.UrlInfo(
        size=tfds.core.utils.Size(size), checksum=checksum, filename=f"sst2_{name}"
    )
    for split, (name, size, checksum) in _FILES.items()
}
"""What each file must be, size in bytes and SHA-256, by its address."""


class SST2SentencesBuilder(tfds.core.GeneratorBasedBuilder):
    """6,920 sentences to train on, 872 to validate and 1,821 to test, each with 0 (negative) or 1 (positive)."""

    name = "sst2_sentences"
    VERSION = tfds.core.Version("1.0.0")
    url_infos = DOWNLOADS

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Sentences of movie reviews, negative or positive; neutral ones are left out.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": tfds.features.Text()}),
            homepage="https://nlp.stanford.edu/sentiment",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        return {split: self._generate_examples(path) for split, path in dl_manager.download(URLS).items()}

    def _generate_examples(self, path: Path) -> Iterator[tuple[int, dict]]:
        with open(path, encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file):
                text, label = line.rstrip("\n").split("\t")
                yield number, {"text": text, "label": label}
