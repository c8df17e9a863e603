"""Pairs of source and target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformer.data import local_files
from transformer.data.configs import Multi30k, NumberWords, ParallelText
from transformer.data.dataset import Example
from transformer.data.sources.prepared import cut, records

NORMALIZATION_OF = {"en": "english_number_words", "pt": "portuguese_number_words"}
"""normalization of number words by their language; of all others: number_words"""


@dataclass(frozen=True)
class Pairs:
    """Pairs by split, `splits`, the normalization of their sources, and how many lines were skipped as half empty."""

    splits: Mapping[str, Sequence[Example]]
    normalization: str = "none"
    skipped: int = 0


def parallel_text(config: ParallelText) -> Pairs:
    """Pairs of one's own files."""
    train, skipped = local_files.read_pairs(config.source_path, config.target_path)
    if config.validation_source_path is not None:
        paths = config.validation_source_path, config.validation_target_path
        held_out, more = local_files.read_pairs(*paths)
        skipped += more
    else:
        option = "--data.validation-source-path"
        end = cut(len(train), config.validation_share, config.source_path, "pairs", option)
        train, held_out = train[:end], train[end:]
    splits = {"train": train, "validation": held_out}
    return Pairs({split: [Example(*pair) for pair in pairs] for split, pairs in splits.items()}, skipped=skipped)


def number_words(config: NumberWords) -> Pairs:
    """Numbers in two languages, each as often as it was drawn."""
    from transformer.data.builders.number_words import NumberWordsBuilder, NumberWordsConfig

    variant = NumberWordsConfig(
        source_language=config.source_language,
        target_language=config.target_language,
        max_digits=config.max_digits,
        train_examples=config.train_examples,
        validation_examples=config.validation_examples,
        test_examples=config.test_examples,
    )
    found = records(NumberWordsBuilder, config.data_dir, variant)
    splits = {
        split: [
            example
            for row in sorted(rows, key=lambda row: row["number"])
            for example in [Example(row["source"].decode(), row["target"].decode(), str(len(str(row["number"]))))]
            * row["times"]
        ]
        for split, rows in found.items()
    }
    return Pairs(splits, NORMALIZATION_OF.get(config.source_language, "number_words"))


def multi30k(config: Multi30k) -> Pairs:
    """Captions by split."""
    from transformer.data.builders.multi30k import Multi30kBuilder, downloads

    found = records(Multi30kBuilder, config.data_dir, config.form, downloads(config.form), config.manual_dir)
    source, target = config.source_language, config.target_language
    return Pairs(
        {split: [Example(row[source].decode(), row[target].decode()) for row in rows] for split, rows in found.items()}
    )
