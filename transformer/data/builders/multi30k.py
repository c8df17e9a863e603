"""Multi30k, task 1: captions of photographs in English and German (Elliott et al. 2016, arXiv 1605.00459)."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path

import tensorflow_datasets as tfds

LANGUAGES = ("en", "de")
"""features of a record"""
SPLITS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
"""name of a split -> what its files begin with"""
_PLACES = {
    "tokenized": ("tok", "{}.lc.norm.tok.{}"),
    "raw": ("raw", "{}.{}.gz"),
}
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


def downloads(form: str) -> Mapping[str, tfds.download.checksums.UrlInfo]:
    """What each file of a form must be, size in bytes and SHA-256, by its address."""
    return {url: _info(url) for split in SPLITS for language in LANGUAGES for url in [_url(form, split, language)]}


def _url(form: str, split: str, language: str) -> str:
    folder, file = _PLACES[form]
    return f"{_URL}/{folder}/{file.format(SPLITS[split], language)}"


def _info(url: str) -> tfds.download.checksums.UrlInfo:
    name = url.rsplit("/", 1)[1]
    size, checksum = _FILES[name]
    return tfds.download.checksums.UrlInfo(size=tfds.core.utils.Size(size), checksum=checksum, filename=name)


class Multi30kBuilder(tfds.core.GeneratorBasedBuilder):
    """29,000 pairs to train on, 1,014 to validate, and 1,000 to test (test_2016_flickr). The name of the
    `builder_config` is their form: "tokenized" (lower-cased, normalized, tokenized: what published BLEU is computed on)
    or "raw".
    """

    name = "multi30k"
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=form) for form in _PLACES]  # noqa: RUF012 - as above
    url_infos = {**downloads("tokenized"), **downloads("raw")}  # noqa: RUF012 - a class attribute of TFDS

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="English captions of photographs and their German translations, by professional translators.",
            features=tfds.features.FeaturesDict({language: tfds.features.Text() for language in LANGUAGES}),
            homepage="https://github.com/multi30k/dataset",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        form = self.builder_config.name
        urls = {split: {language: _url(form, split, language) for language in LANGUAGES} for split in SPLITS}
        return {split: self._generate_examples(paths) for split, paths in dl_manager.download(urls).items()}

    def _generate_examples(self, paths: Mapping[str, Path]) -> Iterator[tuple[int, dict]]:
        read = gzip.open if self.builder_config.name == "raw" else open
        columns = []
        for language in LANGUAGES:
            with read(paths[language], "rt", encoding="utf-8", newline="\n") as file:
                columns.append([line.strip() for line in file])
        for number, pair in enumerate(zip(*columns, strict=True)):
            yield number, dict(zip(LANGUAGES, pair, strict=True))
