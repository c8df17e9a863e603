"""Multi30k, task 1: image captions in English and German (Elliott et al. 2016, arXiv 1605.00459)."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from transformer.config._checks import ConfigError, check_choice
from transformer.data._config import SUBWORDS, TokenizerConfig
from transformer.data._dataset import Example
from transformer.data._pairs import PairConfig, Pairs
from transformer.data.files._tfds import Download, Prepared

LANGUAGES = ("en", "de")
"""fields of a record"""
SPLITS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
"""prefix of the file names of each split"""
_PLACES = {"tokenized": ("tok", "{}.lc.norm.tok.{}"), "raw": ("raw", "{}.{}.gz")}
_URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1"
_FILES = {
    "train.lc.norm.tok.en": (1_837_696, "08925f8e0572bcd5a006702fc5fe20e2d77c6917d4eebd576fc20de6693c2119"),
    "train.lc.norm.tok.de": (2_150_008, "cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505"),
    "val.lc.norm.tok.en": (64_608, "46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec"),
    "val.lc.norm.tok.de": (77_273, "97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00"),
    "test_2016_flickr.lc.norm.tok.en": (63_307, "5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2"),
    "test_2016_flickr.lc.norm.tok.de": (71_917, "c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4"),
    "train.en.gz": (568_929, "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
    "train.de.gz": (637_044, "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
    "val.en.gz": (21_650, "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
    "val.de.gz": (24_681, "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
    "test_2016_flickr.en.gz": (21_077, "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"),
    "test_2016_flickr.de.gz": (22_890, "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"),
}


@dataclass(frozen=True, kw_only=True)
class Multi30k(PairConfig):
    """Image captions in English and German (Elliott et al. 2016, arXiv 1605.00459): 29,000 training pairs, 1,014
    validation pairs, and the 1,000 test pairs of test_2016_flickr.

    Raises:
        ConfigError: both languages are the same.
    """

    kind: ClassVar[str] = "multi30k"

    source_language: Literal["en", "de"] = "en"
    """source language"""
    target_language: Literal["en", "de"] = "de"
    """target language"""
    form: Literal["tokenized", "raw"] = "tokenized"
    """tokenized: lower-cased, normalized and split into words and punctuation, as for published BLEU scores;
    raw: unchanged text"""
    tokenizer: TokenizerConfig = SUBWORDS
    """tokenizer"""
    data_dir: str | None = None
    """folder of prepared TFDS data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """folder that contains the source files, for machines without network access"""

    def __post_init__(self):
        super().__post_init__()
        for field in ("source_language", "target_language"):
            check_choice(field, getattr(self, field), ("en", "de"))
        check_choice("form", self.form, ("tokenized", "raw"))
        if self.source_language == self.target_language:
            raise ConfigError(
                f"source_language and target_language are both {self.source_language!r}. Use en and de, or de and en."
            )

    @property
    def bleu_tokenization(self) -> str:
        """sacreBLEU tokenizer for BLEU: "none" if the text is tokenized already."""
        return "none" if self.form == "tokenized" else "13a"

    def read(self) -> Pairs:
        """Return the captions of every split."""
        found = _prepared(self.form).records(self.data_dir, self.manual_dir)
        source, target = self.source_language, self.target_language
        return Pairs({s: [Example(row[source].decode(), row[target].decode()) for row in found[s]] for s in found})


def _prepared(form: str) -> Prepared:
    """Return the description of the dataset for TFDS, in the given form: "tokenized" or "raw"."""
    folder, pattern = _PLACES[form]
    names = {(s, language): pattern.format(name, language) for s, name in SPLITS.items() for language in LANGUAGES}
    downloads = tuple(Download(f"{_URL}/{folder}/{name}", *_FILES[name], filename=name) for name in names.values())
    read = gzip.open if form == "raw" else open

    def examples(files: Mapping[str, Path]) -> dict[str, Iterator[tuple[int, dict]]]:
        return {split: _captions([files[names[split, language]] for language in LANGUAGES], read) for split in SPLITS}

    return Prepared(
        name="multi30k",
        variant=form,
        description="English captions of photographs and their German translations, by professional translators.",
        homepage="https://github.com/multi30k/dataset",
        features=lambda features: {language: features.Text() for language in LANGUAGES},
        examples=examples,
        downloads=downloads,
    )


def _captions(paths: list[Path], read: Callable) -> Iterator[tuple[int, dict]]:
    """Yield the index of each line, and its captions in all languages."""
    columns = []
    for path in paths:
        with read(path, "rt", encoding="utf-8", newline="\n") as file:
            columns.append([line.strip() for line in file])
    for number, pair in enumerate(zip(*columns, strict=True)):
        yield number, dict(zip(LANGUAGES, pair, strict=True))
