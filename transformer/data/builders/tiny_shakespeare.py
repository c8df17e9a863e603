"""Tiny Shakespeare (Karpathy, char-rnn)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
FILE = tfds.download.checksums.UrlInfo(
    size=tfds.core.utils.Size(1_115_394),
    checksum="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    filename="input.txt",
)
"""what the download must be: size in bytes and SHA-256"""


class TinyShakespeareBuilder(tfds.core.GeneratorBasedBuilder):
    """Tiny Shakespeare under the name, version, splits (90/5/5) and features of TFDS's own builder.

    Either reads what the other prepared; this one needs no TensorFlow to prepare it.
    """

    name = "tiny_shakespeare"
    VERSION = tfds.core.Version("1.0.0")
    url_infos = {URL: FILE}  # noqa: RUF012 - a class attribute of TFDS

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="40,000 lines from plays by Shakespeare.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://github.com/karpathy/char-rnn/blob/master/data/tinyshakespeare/input.txt",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        text = Path(dl_manager.download(URL)).read_text(encoding="utf-8")
        train = int(len(text) * 0.9)
        validation = train + int((len(text) - train) * 0.5)
        return {
            "train": self._generate_examples("train", text[:train]),
            "validation": self._generate_examples("validation", text[train:validation]),
            "test": self._generate_examples("test", text[validation:]),
        }

    def _generate_examples(self, split: str, text: str) -> Iterator[tuple[str, dict]]:
        yield split, {"text": text}
