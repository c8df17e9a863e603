"""Sentence pairs of a TFDS translation dataset, given by name, read without TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from transformer.config._checks import ConfigError, nearest
from transformer.data._config import SUBWORDS, TokenizerConfig
from transformer.data._dataset import Example
from transformer.data._pairs import PairConfig, Pairs
from transformer.data.files._tfds import NAME, no_random_access, open_prepared, unreadable

if TYPE_CHECKING:
    from tensorflow_datasets.core.data_sources.base import BaseDataSource
    from tensorflow_datasets.core.splits import SplitDict

BLOCK = 4096
"""number of pairs per read when iterating"""


@dataclass(frozen=True, kw_only=True)
class TFDSTranslation(PairConfig):
    """Sentence pairs of any TFDS dataset with one text field per language. The dataset must be prepared once in the
    array_record format; it is read without TensorFlow.

    Raises:
        ConfigError: an invalid name, or the same language or split twice.
    """

    kind: ClassVar[str] = "tfds_translation"

    name: str
    """name in TFDS, such as wmt14_translate/de-en, optionally with a version: wmt14_translate/de-en:1.0.0"""
    source_language: str
    """source language: name of its text field in the dataset, such as en"""
    target_language: str
    """target language: name of its text field in the dataset, such as de"""
    train_split: str = "train"
    """training split: a name or a slice, such as train[:99%]"""
    validation_split: str = "validation"
    """validation split, evaluated during training: a name or a slice"""
    test_split: str | None = "test"
    """split to translate after training: a name or a slice (None: the validation split)"""
    tokenizer: TokenizerConfig = SUBWORDS
    """tokenizer"""
    data_dir: str | None = None
    """folder of prepared TFDS data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.name, str) or not re.fullmatch(NAME, self.name):
            raise ConfigError(
                f"name must be the name of a TFDS dataset, such as wmt14_translate/de-en, got {self.name!r}."
            )
        for field in ("source_language", "target_language", "train_split", "validation_split"):
            if not getattr(self, field):
                raise ConfigError(f"{field} must be a name, got {getattr(self, field)!r}.")
        if self.source_language == self.target_language:
            raise ConfigError(
                f"source_language and target_language are both {self.source_language!r}. Use two different ones."
            )
        splits = [self.train_split, self.validation_split, *([] if self.test_split is None else [self.test_split])]
        if len(set(splits)) < len(splits):
            raise ConfigError(
                f"train_split, validation_split and test_split must be different, got {', '.join(splits)}. Use slices "
                "such as train[:99%] and train[99%:] to divide a split."
            )

    def read(self) -> Pairs:
        """Return the pairs of the splits: train, validation and, if configured, test.

        Raises ValueError for another format, a split or language that does not exist, and splits that overlap.
        """
        import tensorflow_datasets as tfds

        folder, builder = open_prepared(self.name, self.data_dir)
        features, splits = builder.info.features, list(builder.info.splits)
        texts = [name for name, feature in dict(features).items() if isinstance(feature, tfds.features.Text)]
        languages = self.source_language, self.target_language
        for field, language in zip(("source_language", "target_language"), languages, strict=True):
            if language not in texts:
                raise ValueError(
                    f"{self.name} has no text {language!r} ({field}): it has {', '.join(texts) or 'no texts'}."
                    f"{nearest(language, texts)} (Read in {folder}.)"
                )
        wanted = {"train": self.train_split, "validation": self.validation_split, "test": self.test_split}
        wanted = {split: name for split, name in wanted.items() if name is not None}
        found, taken = {}, {}
        for split, name in wanted.items():
            if (known := re.match(r"[^\[]*", name)[0]) not in splits:
                raise ValueError(
                    f"{self.name} has no split {known!r} ({split}_split): it has {', '.join(splits)}."
                    f"{nearest(known, splits)} (Read in {folder}.)"
                )
            taken[split] = _parts(builder.info.splits, split, name)
            for other, parts in taken.items():
                if other != split and _overlap(parts, taken[split]):
                    raise ValueError(
                        f"{split}_split {name!r} overlaps with {other}_split {wanted[other]!r}: held-out pairs would "
                        "be trained on, or counted twice. Use disjoint slices, such as train[:99%] and "
                        "train[99%:]."
                    )
            try:
                rows = builder.as_data_source(split=name)
            except NotImplementedError:
                found_format = builder.info.file_format.value
                raise ValueError(no_random_access(self.name, self.data_dir, folder, found_format)) from None
            except Exception as error:
                raise ValueError(unreadable(folder, error)) from error
            found[split] = PreparedPairs(rows, languages, folder)
        return Pairs(found)


class PreparedPairs(Sequence[Example]):
    """Pairs on disk, read on access to save memory; `languages` name the source and target fields of a record."""

    def __init__(self, rows: BaseDataSource, languages: tuple[str, str], folder: Path):
        self._rows, self._languages, self.folder = rows, languages, folder

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, places: int | slice) -> Example | list[Example]:
        chosen = range(len(self))[places]
        return self._read(chosen) if isinstance(places, slice) else self._read([chosen])[0]

    def __iter__(self) -> Iterator[Example]:
        for start in range(0, len(self), BLOCK):
            yield from self[start : start + BLOCK]

    def _read(self, places: Sequence[int]) -> list[Example]:
        try:
            rows = self._rows.__getitems__(list(places))
        except Exception as error:  # damaged files raise errors of any type
            raise ValueError(unreadable(self.folder, error)) from error
        source, target = self._languages
        return [Example(row[source].decode().strip(), row[target].decode().strip()) for row in rows]


def _parts(splits: SplitDict, split: str, name: str) -> list[tuple[str, int, int]]:
    """Return the file ranges of a split: file, first pair, and one past the last."""
    try:
        files = splits[name].file_instructions
    except ValueError:
        files = []
    parts = [(file.filename, file.skip, file.skip + file.take) for file in files]
    if not parts or any(first >= last for _, first, last in parts):
        raise ValueError(
            f"{split}_split {name!r} is not a split, or has no pairs. Use the name of a split, or a "
            "slice such as train[:99%] or train[1000:]."
        )
    return parts


def _overlap(parts: list[tuple[str, int, int]], others: list[tuple[str, int, int]]) -> bool:
    return any(a == b and low < end and start < high for a, low, high in parts for b, start, end in others)
