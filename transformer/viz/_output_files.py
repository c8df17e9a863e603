"""Files that this package draws carry its name, so that an older one can be replaced and a file of the user is not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

GENERATOR = "transformer-zoo"
PNG_METADATA = {"Software": GENERATOR}
"""the text chunk of every PNG"""
HTML_MARK = f'<meta name="generator" content="{GENERATOR}">'
"""the line in the head of every page"""
_SHOWN = 5
_MARKS = f"Software\0{GENERATOR}".encode(), HTML_MARK.encode()
_HEAD = 4096
"""bytes from the start of a file within which the mark is"""


def is_replaceable(path: str | os.PathLike) -> bool:
    """Whether nothing of the user is lost if the file is written: it is missing, empty, or was drawn by this package.

    Raises:
        OSError: it can't be read.
    """
    path = Path(path)
    if not os.path.lexists(path):
        return True
    if not path.is_file():  # a directory, a device, a broken link: writing will tell
        return True
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    return not head or any(mark in head for mark in _MARKS)


def check_replaceable(paths: Iterable[str | os.PathLike]) -> None:
    """Raises FileExistsError if one of the files is not replaceable; it names up to five."""
    if kept := [str(path) for path in paths if not is_replaceable(path)]:
        more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
        which, others = ("it", "another file") if len(kept) == 1 else ("them", "other files")
        raise FileExistsError(
            f"{', '.join(kept[:_SHOWN])}{more} already exists, and this program did not write {which}. Name {others}, "
            f"or pass --overwrite to replace {which}."
        )
