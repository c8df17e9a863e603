"""Tiny Shakespeare (Karpathy's char-rnn)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from transformer.data._texts import Documents, TextConfig
from transformer.data.files._tfds import Download, Prepared, data_dir

FILE = Download(
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    size=1_115_394,
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    filename="input.txt",
)
"""the source file"""


@dataclass(frozen=True, kw_only=True)
class TinyShakespeare(TextConfig):
    """Karpathy's Tiny Shakespeare, prepared by TFDS: 1,115,394 characters, of which the last 10 % are held out, as in
    nanoGPT.
    """

    kind: ClassVar[str] = "tiny_shakespeare"

    data_dir: str | None = None
    """folder of prepared TFDS data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """folder that contains input.txt, for machines without network access"""

    def read(self) -> Documents:
        """Return the text; the last 10 % are held out, as in nanoGPT. ValueError if the prepared text differs."""
        found = PREPARED.records(self.data_dir, self.manual_dir)
        texts = {split: b"".join(row["text"] for row in rows) for split, rows in found.items()}
        whole = b"".join(texts.get(split, b"") for split in ("train", "validation", "test"))
        if hashlib.sha256(whole).hexdigest() != FILE.sha256:
            place = data_dir(self.data_dir) / PREPARED.name
            raise ValueError(
                f"the prepared data in {place} is not Tiny Shakespeare: expected {FILE.size:,} bytes with "
                f"SHA-256 {FILE.sha256}, got {len(whole):,} different bytes. Delete that folder: the next run "
                "prepares it again."
            )
        held_out = (texts["validation"] + texts["test"]).decode()
        return Documents({"train": [texts["train"].decode()], "validation": [held_out]})


def _examples(files: Mapping[str, Path]) -> dict[str, Iterator[tuple[str, dict]]]:
    text = files[FILE.filename].read_text(encoding="utf-8")
    train = int(len(text) * 0.9)
    validation = train + int((len(text) - train) * 0.5)
    parts = {"train": text[:train], "validation": text[train:validation], "test": text[validation:]}
    return {split: iter([(split, {"text": part})]) for split, part in parts.items()}


# Name, version, splits and features equal those of the builder in TFDS, so that each can read data prepared by the
# other.
PREPARED = Prepared(
    name="tiny_shakespeare",
    description="40,000 lines from plays by Shakespeare.",
    homepage="https://github.com/karpathy/char-rnn/blob/master/data/tinyshakespeare/input.txt",
    features=lambda features: {"text": features.Text()},
    examples=_examples,
    downloads=(FILE,),
)
"""description of the dataset for TFDS"""
