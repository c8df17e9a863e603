"""Texts with the class each is of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer.data import local_files
from transformer.data.configs import SST2, LabeledText, SST2Sentences
from transformer.data.sources.prepared import cut, data_dir, records


@dataclass(frozen=True)
class Labeled:
    """Labeled texts by split, `splits`: each a text and the number of its label among `labels`."""

    splits: dict[str, list[tuple[str, int]]]
    labels: tuple[str, ...]


def labeled_text(config: LabeledText) -> Labeled:
    """Texts of one's own. ValueError where there is but one label."""
    columns = config.text_column, config.label_column
    train = local_files.read_labeled(config.path, *columns)
    if config.validation_path is not None:
        held_out = local_files.read_labeled(config.validation_path, *columns)
    else:
        end = cut(len(train), config.validation_share, config.path, "texts")
        train, held_out = train[:end], train[end:]
    labels = config.labels or tuple(sorted({label for _, label in train}))
    if len(labels) < 2:
        raise ValueError(f"{config.path} has one label, {labels[0]!r}: there is nothing to tell apart.")
    splits = {"train": (config.path, train), "validation": (config.validation_path or config.path, held_out)}
    return Labeled({split: _numbered(*rows, labels, labels) for split, rows in splits.items()}, labels)


def sst2(config: SST2) -> Labeled:
    """The files of GLUE. FileNotFoundError where they are not, and what to put where."""
    folder = Path(config.manual_dir or "").expanduser()
    files = {"train": folder / "train.tsv", "validation": folder / "dev.tsv"}
    if config.manual_dir is None or not all(path.is_file() for path in files.values()):
        missing = [path.name for path in files.values() if not path.is_file()]
        told = (
            "no folder of SST-2 is named" if config.manual_dir is None else f"no {' and no '.join(missing)} in {folder}"
        )
        raise FileNotFoundError(
            f"{told}: get SST-2.zip of the GLUE benchmark (gluebenchmark.com/tasks), put its train.tsv and dev.tsv "
            f"into a folder of your choice, and name the folder with --data.manual-dir FOLDER."
        )
    splits = {}
    for split, path in files.items():
        rows = local_files.read_labeled(str(path), "sentence", "label")
        splits[split] = _numbered(str(path), rows, ("0", "1"), config.labels)
    return Labeled(splits, config.labels)


def sst2_sentences(config: SST2Sentences) -> Labeled:
    """Whole sentences, with a test split."""
    from transformer.data.builders.sst2_sentences import DOWNLOADS, SST2SentencesBuilder

    found = records(SST2SentencesBuilder, config.data_dir, downloads=DOWNLOADS, manual_dir=config.manual_dir)
    place = str(data_dir(config.data_dir) / SST2SentencesBuilder.name)
    splits = {
        split: _numbered(
            place, [(row["text"].decode(), row["label"].decode()) for row in rows], ("0", "1"), config.labels
        )
        for split, rows in found.items()
    }
    return Labeled(splits, config.labels)


def _numbered(
    path: str, rows: list[tuple[str, str]], written: tuple[str, ...], labels: tuple[str, ...]
) -> list[tuple[str, int]]:
    """The rows with the place of each label among those that a file writes."""
    numbers = {label: number for number, label in enumerate(written)}
    if strange := sorted({label for _, label in rows} - numbers.keys()):
        raise ValueError(
            f"{path} has the label {strange[0]!r}: expected {', '.join(written)} ({', '.join(labels)}). Mend the file, "
            "or name all labels (--data.labels)."
        )
    return [(text, numbers[label]) for text, label in rows]
