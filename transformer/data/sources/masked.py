"""Texts alone, to learn to fill in."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.data import local_files
from transformer.data.configs import MaskedSST2, MaskedText, SST2Sentences
from transformer.data.sources.labeled import sst2_sentences
from transformer.data.sources.prepared import cut


@dataclass(frozen=True)
class Texts:
    """Texts by split, `splits`, each a whole."""

    splits: dict[str, list[str]]


def masked_text(config: MaskedText) -> Texts:
    """The lines of a file that are not empty."""

    def lines(path: str) -> list[str]:
        return [line for line in local_files.read_lines(path) if line]

    train = lines(config.path)
    if config.validation_path is not None:
        return Texts({"train": train, "validation": lines(config.validation_path)})
    end = cut(len(train), config.validation_share, config.path, "lines")
    return Texts({"train": train[:end], "validation": train[end:]})


def masked_sst2(config: MaskedSST2) -> Texts:
    """The sentences of SST-2 without their labels."""
    labeled = sst2_sentences(SST2Sentences(data_dir=config.data_dir, manual_dir=config.manual_dir))
    return Texts({split: [text for text, _ in rows] for split, rows in labeled.splits.items()})
