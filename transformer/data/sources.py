"""From a kind of data to its texts by split: prepared by TFDS, or read from one's own files."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.data import local_files
from transformer.data.configs import (
    SST2,
    DataConfig,
    JsonLines,
    LabeledText,
    LocalText,
    NumberWords,
    ParallelText,
    TextFile,
    TinyShakespeare,
)
from transformer.data.dataset import Example

NORMALIZATION_OF = {"en": "english_number_words", "pt": "portuguese_number_words"}
"""normalization of number words by their language; of all others: number_words"""


@dataclass(frozen=True)
class Documents:
    """Running text: documents by split, `splits`. With `separate`, an end token follows each document."""

    splits: dict[str, list[str]]
    separate: bool = False


@dataclass(frozen=True)
class Pairs:
    """Pairs by split, `splits`, the normalization of their sources, and how many lines were skipped as half empty."""

    splits: dict[str, list[Example]]
    normalization: str = "none"
    skipped: int = 0


@dataclass(frozen=True)
class Labeled:
    """Labeled texts by split, `splits`: each a text and the number of its label among `labels`."""

    splits: dict[str, list[tuple[str, int]]]
    labels: tuple[str, ...]


def read(config: DataConfig) -> Documents | Pairs | Labeled:
    """The texts of any kind of data. FileNotFoundError, ValueError (bad input) or OSError (no network, no room)."""
    match config:
        case NumberWords():
            return _number_words(config)
        case TinyShakespeare():
            return _tiny_shakespeare(config)
        case TextFile() | JsonLines():
            return _local_text(config)
        case ParallelText():
            return _parallel_text(config)
        case LabeledText():
            return _labeled_text(config)
        case SST2():
            return _sst2(config)
    raise ValueError(f"data must be one of the kinds in transformer.data.DATA, got {type(config).__name__}.")


def _local_text(config: LocalText) -> Documents:
    separate = isinstance(config, JsonLines)

    def documents(path: str) -> list[str]:
        return local_files.read_json_lines(path, config.field) if separate else [local_files.read_text(path)]

    train = documents(config.path)
    if config.validation_path is not None:
        return Documents({"train": train, "validation": documents(config.validation_path)}, separate)
    if separate:
        cut = _cut(len(train), config.validation_share, config.path, "documents")
        return Documents({"train": train[:cut], "validation": train[cut:]}, separate)
    cut = _cut(len(train[0]), config.validation_share, config.path, "characters")
    return Documents({"train": [train[0][:cut]], "validation": [train[0][cut:]]}, separate)


def _parallel_text(config: ParallelText) -> Pairs:
    train, skipped = local_files.read_pairs(config.source_path, config.target_path)
    if config.validation_source_path is not None:
        paths = config.validation_source_path, config.validation_target_path
        held_out, more = local_files.read_pairs(*paths)
        skipped += more
    else:
        cut = _cut(len(train), config.validation_share, config.source_path, "pairs")
        train, held_out = train[:cut], train[cut:]
    splits = {"train": train, "validation": held_out}
    return Pairs({split: [Example(*pair) for pair in pairs] for split, pairs in splits.items()}, skipped=skipped)


def _labeled_text(config: LabeledText) -> Labeled:
    columns = config.text_column, config.label_column
    train = local_files.read_labeled(config.path, *columns)
    if config.validation_path is not None:
        held_out = local_files.read_labeled(config.validation_path, *columns)
    else:
        cut = _cut(len(train), config.validation_share, config.path, "texts")
        train, held_out = train[:cut], train[cut:]
    labels = config.labels or tuple(sorted({label for _, label in train}))
    if len(labels) < 2:
        raise ValueError(f"{config.path} has one label, {labels[0]!r}: there is nothing to tell apart.")
    splits = {"train": (config.path, train), "validation": (config.validation_path or config.path, held_out)}
    return Labeled({split: _numbered(*rows, labels, labels) for split, rows in splits.items()}, labels)


def _sst2(config: SST2) -> Labeled:
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


def _cut(count: int, share: float, path: str, what: str) -> int:
    """Where the held-out end begins; both parts have something in them."""
    if count < 2:
        raise ValueError(
            f"{path} has too little to hold some out: expected at least 2 {what}, got {count}. Give more text, or a "
            "second file to evaluate on (--data.validation-path)."
        )
    return min(max(int(count * (1 - share)), 1), count - 1)


def _number_words(config: NumberWords) -> Pairs:
    from transformer.data import builders

    variant = builders.NumberWordsConfig(
        source_language=config.source_language,
        target_language=config.target_language,
        max_digits=config.max_digits,
        train_examples=config.train_examples,
        validation_examples=config.validation_examples,
        test_examples=config.test_examples,
    )
    records = _records(builders.NumberWordsBuilder, config.data_dir, variant)
    splits = {
        split: [
            Example(row["source"].decode(), row["target"].decode(), str(len(str(row["number"]))))
            for row in sorted(rows, key=lambda row: row["number"])
            for _ in range(row["times"])
        ]
        for split, rows in records.items()
    }
    return Pairs(splits, NORMALIZATION_OF.get(config.source_language, "number_words"))


def _tiny_shakespeare(config: TinyShakespeare) -> Documents:
    from transformer.data import builders

    file = builders.TINY_SHAKESPEARE_FILE
    if config.manual_dir is not None:
        _check_manual_file(Path(config.manual_dir).expanduser(), file)
    records = _records(
        builders.TinyShakespeareBuilder,
        config.data_dir,
        url=builders.TINY_SHAKESPEARE_URL,
        file=file,
        manual_dir=config.manual_dir,
    )
    texts = {split: b"".join(row["text"] for row in rows) for split, rows in records.items()}
    whole = b"".join(texts.get(split, b"") for split in ("train", "validation", "test"))
    if hashlib.sha256(whole).hexdigest() != file.checksum:
        place = _data_dir(config.data_dir) / "tiny_shakespeare"
        raise ValueError(
            f"the prepared data in {place} is not Tiny Shakespeare: expected {int(file.size):,} bytes with "
            f"SHA-256 {file.checksum}, got {len(whole):,} others. Delete that folder: the next run prepares it anew."
        )
    held_out = (texts["validation"] + texts["test"]).decode()
    return Documents({"train": [texts["train"].decode()], "validation": [held_out]})


def _data_dir(data_dir: str | None) -> Path:
    return Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def _records(
    builder_class: Any,
    data_dir: str | None,
    variant: Any = None,
    url: str | None = None,
    file: Any = None,
    manual_dir: str | None = None,
) -> dict[str, list[dict]]:
    """All records by split, prepared first where they are not. `url` and `file` say what preparing must download."""
    import tensorflow_datasets as tfds

    place = _data_dir(data_dir)
    try:
        with _quiet():
            builder = builder_class(data_dir=place, config=variant, file_format="array_record")
    except Exception as error:  # TFDS reads what is there with whatever its files raise
        raise ValueError(_unreadable(place / builder_class.name, error)) from error
    with _quiet():
        prepared = builder.is_prepared()
    if not prepared:
        if url is not None and manual_dir is None:
            _check_reachable(url, file)
        settings = tfds.download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
        try:
            with _quiet():
                builder.download_and_prepare(download_config=settings)
        except OSError as error:
            raise OSError(
                f"can't prepare {builder.name} in {place}: {error}. Name a folder that can be "
                "written (--data.data-dir)."
            ) from error
    try:
        sources = builder.as_data_source()
        return {split: list(source.__getitems__(list(range(len(source))))) for split, source in sources.items()}
    except Exception as error:
        raise ValueError(_unreadable(builder.data_path, error)) from error


def _unreadable(place: os.PathLike, error: Exception) -> str:
    return (
        f"the prepared data in {place} can't be read: {str(error).strip()[:200]}. Delete that folder (the next run "
        "prepares it anew), or name another one (--data.data-dir)."
    )


def _where_to_put(url: str, file: Any) -> str:
    return f"the file {file.filename} ({int(file.size):,} bytes, SHA-256 {file.checksum}) from {url}"


def _check_reachable(url: str, file: Any) -> None:
    """TFDS retries for minutes where there is no network: ask once, and say what to do."""
    import requests

    try:
        requests.head(url, timeout=20, allow_redirects=True).raise_for_status()
    except requests.RequestException as error:
        reason = type(error).__name__
        raise OSError(
            f"can't download {url} ({reason}). Without network: put {_where_to_put(url, file)} into a folder of your "
            "choice and name the folder with --data.manual-dir FOLDER."
        ) from error


def _check_manual_file(folder: Path, file: Any) -> None:
    from transformer.data import builders

    path = folder / file.filename
    wanted = _where_to_put(builders.TINY_SHAKESPEARE_URL, file)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}. Put {wanted} there (--data.manual-dir {folder}).")
    content = path.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != file.checksum:
        raise ValueError(
            f"{path} is not the file expected: got {len(content):,} bytes, SHA-256 {checksum}. Put {wanted} there."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """TFDS prints to stdout, draws bars and warns about every configuration: none of it belongs into our output."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
