"""Marks in the files that this package writes, so that it replaces only its own files and no file of the user."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from transformer.config._checks import shortened

GENERATOR = "transformer-zoo"
PNG_METADATA = {"Software": GENERATOR}
"""metadata of every PNG file"""
HTML_MARK = f'<meta name="generator" content="{GENERATOR}">'
"""line in the head of every HTML page"""
_MARKS = f"Software\0{GENERATOR}".encode(), HTML_MARK.encode()
_HEAD = 4096
"""number of bytes at the start of a file in which the mark is searched"""


def is_replaceable(path: str | os.PathLike) -> bool:
    """Return whether a file is missing, empty or written by this package: it can be replaced without losing data."""
    path = Path(path)
    if not os.path.lexists(path):
        return True
    if not path.is_file():  # a directory, a device or a broken link: writing raises the error, if any
        return True
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    return not head or any(mark in head for mark in _MARKS)


def files_in(directory: Path, names: Iterable[str], overwrite: bool) -> list[Path]:
    """Create a directory for files with these names, and return their paths. Raises as `check_replaceable`."""
    paths = [directory / name for name in names]
    if not overwrite:
        check_replaceable(paths)
    directory.mkdir(parents=True, exist_ok=True)
    return paths


def check_replaceable(paths: Iterable[str | os.PathLike]) -> None:
    """Raise FileExistsError if one of the files is not replaceable; the message lists up to five of them."""
    if kept := [str(path) for path in paths if not is_replaceable(path)]:
        which, others = ("it", "another file") if len(kept) == 1 else ("them", "other files")
        raise FileExistsError(
            f"{shortened(kept)} already exists, and this program did not write {which}. Pass {others}, "
            f"or pass --overwrite to replace {which}."
        )
