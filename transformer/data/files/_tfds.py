"""Datasets that TFDS has prepared as array_record files: find them, and open them without TensorFlow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformer.data.files._prepared import data_dir

NAME = r"[A-Za-z0-9_][\w.+-]*(/[A-Za-z0-9_][\w.+-]*)?(:\d+\.\d+\.\d+)?"
"""regular expression of the name of a dataset, optionally with a config and a version: wmt14_translate/de-en:1.0.0"""


def open_prepared(name: str, folder: str | None) -> tuple[Path, Any]:
    """Open a prepared dataset.

    Args:
        name: name in TFDS, with or without a version; without, the newest prepared version.
        folder: directory of prepared datasets; None: the default of `data_dir`.

    Returns:
        Its folder, and a builder with `info.features`, `info.splits` and `as_data_source`.

    Raises:
        FileNotFoundError: the dataset is not prepared.
        ValueError: the prepared files are damaged.
    """
    import tensorflow_datasets as tfds

    place = _prepared_folder(name, folder)
    try:
        # Not tfds.builder(name), because the class of the dataset may import TensorFlow.
        builder = tfds.builder_from_directory(place)
        # Both are read from files at the first access.
        dict(builder.info.features)
        list(builder.info.splits)
    except Exception as error:  # damaged files make TFDS raise errors of any type
        raise ValueError(unreadable(place, error)) from error
    return place, builder


def no_random_access(name: str, folder: str | None, place: Path, file_format: str) -> str:
    """Return the error message for a dataset that is prepared in another format than array_record."""
    return (
        f"{name} was prepared in {place} as {file_format}, which does not support random access. Delete that folder, "
        f"or use another one (--data.data-dir), and prepare it again. {_how_to_prepare(name, folder)}"
    )


def unreadable(folder: Path, error: Exception) -> str:
    """Return the error message for damaged files."""
    return (
        f"the prepared data in {folder} can't be read: {str(error).strip()[:200]}. Delete that folder and prepare it "
        "again, or use another one (--data.data-dir)."
    )


def _prepared_folder(dataset: str, folder: str | None) -> Path:
    """Return the folder of a prepared dataset: the version in the name, or else the newest version."""
    name, _, version = dataset.partition(":")
    root = data_dir(folder)
    place = root / name
    versions = {
        tuple(map(int, path.name.split("."))): path
        for path in place.glob("*.*.*")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.name)
    }
    if not version and versions:
        return versions[max(versions)]
    if version and (place / version).is_dir():
        return place / version
    variants = sorted({f"{name}/{path.parent.name}" for path in place.glob("*/*.*.*") if path.is_dir()})
    others = [f"{name}:{path.name}" for _, path in sorted(versions.items())] or variants
    there = f" Found: {', '.join(others)}." if others else ""
    raise FileNotFoundError(
        f"{dataset} is not prepared in {root} (--data.data-dir; default: $TFDS_DATA_DIR, else "
        f"~/tensorflow_datasets).{there} Prepare it. {_how_to_prepare(dataset, folder)}"
    )


def _how_to_prepare(name: str, folder: str | None) -> str:
    """Return instructions to prepare the dataset, which most TFDS builders can't do without TensorFlow."""
    place = str(data_dir(folder))
    return (
        "Run this once on a machine with TensorFlow (the folder may then be copied): "
        f'python -c "import tensorflow_datasets as tfds; tfds.builder({name!r}, data_dir={place!r}, '
        "file_format='array_record').download_and_prepare()\""
    )
