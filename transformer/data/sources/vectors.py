"""Time series and images."""

from __future__ import annotations

import csv
import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer.config import nearest
from transformer.data import local_files
from transformer.data.configs import Digits, ETTh1, ImageFile, SeriesFile
from transformer.data.sources.prepared import records


@dataclass(frozen=True)
class Series:
    """A time series: `values` (steps, channels), `columns`, which name the channels, and in `splits` which steps each
    split is to forecast, from the first up to and without the last.
    """

    values: np.ndarray
    columns: tuple[str, ...]
    splits: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Images:
    """Images by split, `splits`: (N, height, width, channels), float32, and the numbers of their classes (N,) among
    `labels`.
    """

    splits: dict[str, tuple[np.ndarray, np.ndarray]]
    labels: tuple[str, ...]


def etth1(config: ETTh1) -> Series:
    """The series with the literature's splits."""
    from transformer.data.builders.ett import COLUMNS, FILE, SPLITS, URL, ETTh1Builder

    found = records(ETTh1Builder, config.data_dir, downloads={URL: FILE}, manual_dir=config.manual_dir)
    values = np.concatenate([found[split][0]["values"] for split in SPLITS])
    return _chosen(Series(values, COLUMNS, SPLITS), config.columns, ETTh1Builder.name)


def series_file(config: SeriesFile) -> Series:
    """The columns of a file that hold numbers; the splits follow each other in time. FileNotFoundError, or ValueError
    for a file without such columns or with a line that lacks a number.
    """
    reader = csv.reader(io.StringIO(local_files.read_text(config.path)))  # a quoted cell may hold a line feed
    try:
        (_, header), *lines = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"{config.path}, line {reader.line_num}: {error}. Mend the line.") from error
    header = [name.strip() for name in header]
    if len(set(header)) < len(header):
        raise ValueError(f"{config.path} names a column twice in its first line: {', '.join(header)[:200]}.")
    for number, row in lines:
        if len(row) != len(header):
            raise ValueError(
                f"{config.path}, line {number}: expected {len(header)} columns as in the first line, got {len(row)}: "
                f"{','.join(row)[:60]!r}. Mend the line."
            )
    wanted = config.columns or tuple(
        name for name, text in zip(header, lines[0][1] if lines else [], strict=False) if _number(text) is not None
    )
    if not wanted:
        raise ValueError(f"{config.path} has no column of numbers: its first step is {lines[:1]!r:.100}.")
    for name in wanted:
        if name not in header:
            raise ValueError(
                f"{config.path} has no column {name!r}: its first line names {', '.join(header)[:200]}."
                f"{nearest(name, header)} Name columns of it (--data.columns)."
            )
    values = np.empty((len(lines), len(wanted)))
    for channel, name in enumerate(wanted):
        place = header.index(name)
        for step, (number, row) in enumerate(lines):
            value = _number(row[place])
            if value is None:
                raise ValueError(
                    f"{config.path}, line {number}: expected a number in column {name}, got {row[place]!r:.40}. Fill "
                    "in what is missing, or leave the column out (--data.columns names those to take)."
                )
            values[step, channel] = value
    count = len(values)
    test, validation = round(count * config.test_share), round(count * config.validation_share)
    ends = {"train": count - test - validation, "validation": count - test, "test": count}
    starts = dict(zip(ends, (0, *ends.values()), strict=False))
    return Series(values, wanted, {split: (starts[split], ends[split]) for split in ends})


def digits(config: Digits) -> Images:
    """Scikit-learn's digits, 0 to 1. ModuleNotFoundError where it is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn.",
            name="sklearn",
        ) from error
    found = load_digits()
    images = (found.images / 16.0).astype(np.float32)[..., None]
    return Images(_by_hash(images, found.target.astype(np.int32), 0.1, 0.2), config.labels)


def image_file(config: ImageFile) -> Images:
    """The images of a file, bytes as 0 to 1. FileNotFoundError, or ValueError for a file that holds something else, or
    labels that are out of range or all the same.
    """
    images, numbers = _arrays(config.path)
    if numbers.min() < 0 or (config.labels and numbers.max() >= len(config.labels)):
        bad = numbers.min() if numbers.min() < 0 else numbers.max()
        names = f"0 to {len(config.labels) - 1} ({', '.join(config.labels)[:100]})" if config.labels else "0 and above"
        raise ValueError(f"{config.path} has the label {bad}: expected {names}. Mend the file, or --data.labels.")
    labels = config.labels or tuple(map(str, range(int(numbers.max()) + 1)))
    if len(labels) < 2:
        raise ValueError(f"{config.path} has one label, {labels[0]!r}: there is nothing to tell apart.")
    splits = _by_hash(images, numbers.astype(np.int32), config.validation_share, config.test_share)
    return Images(splits, labels)


def _arrays(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, height, width, channels), float32, and labels (N,) of a file, when they are what they should be."""
    file = Path(path).expanduser()
    if not file.is_file():
        siblings = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        raise FileNotFoundError(f"no file {path}.{nearest(file.name, siblings)} Check the path.")
    try:
        with np.load(file, allow_pickle=False) as found:
            images, numbers = found["images"], found["labels"]
    except (ValueError, TypeError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is no .npz file of two arrays, images and labels ({error}). Write one with "
            "numpy.savez(path, images=..., labels=...)."
        ) from error
    if images.ndim not in (3, 4) or not (images.dtype == np.uint8 or np.issubdtype(images.dtype, np.floating)):
        raise ValueError(
            f"images in {path} must be bytes or floating numbers of shape (N, height, width) or (N, height, width, "
            f"channels), got {images.dtype} of shape {images.shape}."
        )
    if numbers.shape != (len(images),) or not np.issubdtype(numbers.dtype, np.integer) or not len(numbers):
        raise ValueError(
            f"labels in {path} must be whole numbers, one for each of the {len(images)} images, got {numbers.dtype} of "
            f"shape {numbers.shape}."
        )
    images = images if images.ndim == 4 else images[..., None]
    images = images.astype(np.float32) / (255.0 if images.dtype == np.uint8 else 1.0)
    if not np.isfinite(images).all():
        raise ValueError(f"image {int(np.argwhere(~np.isfinite(images))[0, 0])} of {path} is not finite. Mend it.")
    return images.astype(np.float32), numbers


def _by_hash(
    images: np.ndarray, numbers: np.ndarray, validation_share: float, test_share: float
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows by split. The hash of an image decides, so that equal images, and images added later, change no other's."""
    places = np.array(
        [int.from_bytes(hashlib.sha256(image.astype("<f4").tobytes()).digest()[:4], "big") for image in images]
    )
    share = places / 2**32
    chosen = {
        "train": share >= validation_share + test_share,
        "validation": (share >= test_share) & (share < validation_share + test_share),
        "test": share < test_share,
    }
    for split, rows in chosen.items():
        if not rows.any():
            raise ValueError(f"no image is left to {split}: {len(images)} are too few for these shares.")
    return {split: (images[rows], numbers[rows]) for split, rows in chosen.items()}


def _chosen(series: Series, columns: tuple[str, ...], what: str) -> Series:
    """The series with these channels alone; with all of them where none is named."""
    if not columns:
        return series
    for name in columns:
        if name not in series.columns:
            raise ValueError(
                f"{what} has no column {name!r}: expected some of {', '.join(series.columns)}."
                f"{nearest(name, series.columns)}"
            )
    places = [series.columns.index(name) for name in columns]
    return Series(series.values[:, places], columns, series.splits)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) else None
