"""Kinds of labeled text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.config import ConfigError
from transformer.data.configs.common import LabeledConfig, check_path, check_share


@dataclass(frozen=True, kw_only=True)
class LabeledText(LabeledConfig):
    """Texts of one's own and their classes: a tab-separated file (UTF-8) whose first line names its columns.

    Raises:
        ConfigError: an empty path, a share out of range, or one column for both.
    """

    kind: ClassVar[str] = "labeled_text"

    path: str
    """the file to train on"""
    validation_path: str | None = None
    """a second file to evaluate on (None: the end of the first)"""
    validation_share: float = 0.1
    """share at the end of the file to evaluate on when there is no validation_path"""
    text_column: str = "sentence"
    """name of the column that holds the text"""
    label_column: str = "label"
    """name of the column that holds its class"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_share(self, "validation_share")
        if not self.text_column or not self.label_column or self.text_column == self.label_column:
            raise ConfigError(
                f"text_column and label_column must name two columns, got {self.text_column!r} and "
                f"{self.label_column!r}."
            )


@dataclass(frozen=True, kw_only=True)
class SST2(LabeledConfig):
    """Phrases and sentences of movie reviews, negative or positive (Socher et al. 2013), in the files of GLUE (Wang et
    al. 2018, arXiv 1804.07461): 67,349 of train.tsv to train on, 872 of dev.tsv to evaluate on.

    Raises:
        ConfigError: other than two labels.
    """

    kind: ClassVar[str] = "sst2"

    labels: tuple[str, ...] = ("negative", "positive")
    """names of the classes that the files write as 0 and 1"""
    manual_dir: str | None = None
    """the folder that holds train.tsv and dev.tsv"""

    def __post_init__(self):
        super().__post_init__()
        _check_two(self.labels)


@dataclass(frozen=True, kw_only=True)
class SST2Sentences(LabeledConfig):
    """Whole sentences of movie reviews, negative or positive, through TFDS: 6,920 to train on, 872 to validate and
    1,821 to test (Socher et al. 2013, section 5; the split that papers on sentences report).

    Raises:
        ConfigError: other than two labels.
    """

    kind: ClassVar[str] = "sst2_sentences"

    labels: tuple[str, ...] = ("negative", "positive")
    """names of the classes that the files write as 0 and 1"""
    data_dir: str | None = None
    """where TFDS keeps prepared data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """a folder that holds sst2_train.tsv, sst2_dev.tsv and sst2_test.tsv, for a machine without network"""

    def __post_init__(self):
        super().__post_init__()
        _check_two(self.labels)


def _check_two(labels: tuple[str, ...]) -> None:
    if len(labels) != 2:
        raise ConfigError(f"labels must be two, for 0 and 1 in the files, got {len(labels)}.")
