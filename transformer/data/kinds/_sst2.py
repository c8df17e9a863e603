"""SST-2: sentiment of movie reviews (Socher et al. 2013), as phrases (GLUE) or whole sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from transformer.config._checks import ConfigError
from transformer.data._labels import Labeled, LabeledConfig, numbered
from transformer.data._masked_texts import MaskedConfig
from transformer.data.files._texts import read_labeled
from transformer.data.files._tfds import Download, Prepared, data_dir

_URL = "https://raw.githubusercontent.com/clairett/pytorch-sentiment-classification/master/data/SST2"
FILES = {
    split: Download(f"{_URL}/{name}.tsv", size, sha256, filename=f"sst2_{name}.tsv")
    for split, name, size, sha256 in (
        ("train", "train", 720_259, "ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920"),
        ("validation", "dev", 92_057, "eddea6b39e601dd4e7a672b53cc40fdf6019fa80522f351206c24340ca5d9359"),
        ("test", "test", 188_749, "831169c7e2e429d6026e1bdbb542f33b636e3e596caad9602ebc953c205928b7"),
    )
}
"""source files of the whole sentences, by split"""


@dataclass(frozen=True, kw_only=True)
class _TwoClasses(LabeledConfig):
    """Options of sentences that are negative or positive."""

    labels: tuple[str, ...] = ("negative", "positive")
    """names of the classes 0 and 1 in the files"""

    def __post_init__(self):
        super().__post_init__()
        if len(self.labels) != 2:
            raise ConfigError(
                f"labels must have two names, for the classes 0 and 1 in the files, got {len(self.labels)}."
            )


@dataclass(frozen=True, kw_only=True)
class SST2(_TwoClasses):
    """Negative and positive phrases of movie reviews (Socher et al. 2013), from the files of GLUE (Wang et al. 2018,
    arXiv 1804.07461): 67,349 phrases and sentences in train.tsv for training, 872 sentences in dev.tsv for evaluation.

    Raises:
        ConfigError: the number of labels is not two.
    """

    kind: ClassVar[str] = "sst2"

    manual_dir: str | None = None
    """folder that contains train.tsv and dev.tsv of GLUE (required)"""

    def read(self) -> Labeled:
        """Return the texts of the GLUE files. Raises FileNotFoundError with the folder in which a file is missing."""
        folder = Path(self.manual_dir or "").expanduser()
        files = {"train": folder / "train.tsv", "validation": folder / "dev.tsv"}
        if self.manual_dir is None or not all(path.is_file() for path in files.values()):
            missing = [path.name for path in files.values() if not path.is_file()]
            problem = f"no {' and no '.join(missing)} in {folder}"
            if self.manual_dir is None:
                problem = "the folder of SST-2 is not set"
            raise FileNotFoundError(
                f"{problem}: download SST-2.zip of the GLUE benchmark (gluebenchmark.com/tasks), put train.tsv and "
                f"dev.tsv into a folder, and pass it with --data.manual-dir FOLDER."
            )
        splits = {}
        for split, path in files.items():
            rows = read_labeled(str(path), "sentence", "label")
            splits[split] = numbered(str(path), rows, ("0", "1"), self.labels)
        return Labeled(splits, self.labels)


@dataclass(frozen=True, kw_only=True)
class SST2Sentences(_TwoClasses):
    """Negative and positive sentences of movie reviews, prepared by TFDS: 6,920 for training, 872 for validation and
    1,821 for the test (Socher et al. 2013, section 5). Papers on whole sentences use these splits.

    Raises:
        ConfigError: the number of labels is not two.
    """

    kind: ClassVar[str] = "sst2_sentences"

    data_dir: str | None = None
    """folder of prepared TFDS data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """folder that contains sst2_train.tsv, sst2_dev.tsv and sst2_test.tsv, for machines without network access"""

    def read(self) -> Labeled:
        """Return the sentences of every split."""
        place = str(data_dir(self.data_dir) / PREPARED.name)
        splits = {
            split: numbered(place, rows, ("0", "1"), self.labels)
            for split, rows in _sentences(self.data_dir, self.manual_dir).items()
        }
        return Labeled(splits, self.labels)


@dataclass(frozen=True, kw_only=True)
class MaskedSST2(MaskedConfig):
    """The sentences of SST2Sentences without their labels, in the same splits."""

    kind: ClassVar[str] = "masked_sst2"

    data_dir: str | None = None
    """folder of prepared TFDS data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """folder that contains sst2_train.tsv, sst2_dev.tsv and sst2_test.tsv, for machines without network access"""

    def read(self) -> dict[str, list[str]]:
        """Return the sentences of every split."""
        found = _sentences(self.data_dir, self.manual_dir)
        return {split: [text for text, _ in rows] for split, rows in found.items()}


def _sentences(folder: str | None, manual_dir: str | None) -> dict[str, list[tuple[str, str]]]:
    """Return the sentences of every split, each with its label in the file: 0 or 1."""
    found = PREPARED.records(folder, manual_dir)
    return {split: [(row["text"].decode(), row["label"].decode()) for row in rows] for split, rows in found.items()}


def _examples(files: Mapping[str, Path]) -> dict[str, Iterator[tuple[int, dict]]]:
    return {split: _rows(files[file.filename]) for split, file in FILES.items()}


def _rows(path: Path) -> Iterator[tuple[int, dict]]:
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file):
            text, label = line.rstrip("\n").split("\t")
            yield number, {"text": text, "label": label}


PREPARED = Prepared(
    name="sst2_sentences",
    description="Sentences of movie reviews, negative or positive; without neutral ones.",
    homepage="https://nlp.stanford.edu/sentiment",
    features=lambda features: {"text": features.Text(), "label": features.Text()},
    examples=_examples,
    downloads=tuple(FILES.values()),
)
"""description of the dataset for TFDS"""
