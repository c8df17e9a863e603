"""Files of a directory that somebody else made: only what lies in it is opened, so much and no more, and JSON strictly.

A symbolic link may lead to a regular file in the directory itself, or, from `snapshots/REVISION/` of the hub's cache
(which is made of such links), to the `blobs/` beside it. Any other link is refused: whoever made the directory would
choose a file of whoever opens it. A pipe or a device is not waited for.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

MAX_JSON_BYTES = 64 * 2**20
"""bound of a JSON file, where nothing else is said"""
MAX_DEPTH = 64
"""objects and arrays of a JSON file that may lie in each other"""


def regular_file(directory: Path, filename: str) -> Path:
    """The path of a file of the directory ("a.json", "b/a.json"), when it is a regular one that may be opened.

    Raises:
        ValueError: it is not there, a link that leads out or nowhere, no regular file, or a name that leads out.
    """
    name = PurePosixPath(filename)
    if name.is_absolute() or ".." in name.parts or "\\" in filename or "\0" in filename:
        raise ValueError(f"{filename!r} must name a file of the directory")
    path, home = directory / filename, directory.resolve()
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop of links is a RuntimeError until Python 3.13
        raise ValueError(f"{filename} is not there, or a link that leads nowhere: get it anew") from None
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(f"{filename} is a link to {target}, outside of the directory: put the file itself there")
    if not target.is_file():
        raise ValueError(f"{filename} must be a regular file; a directory, pipe or device is not read")
    return path


def read_bounded(directory: Path, filename: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """What is in a file of the directory. ValueError as `regular_file`, or more than `limit` bytes."""
    path = regular_file(directory, filename)
    with path.open("rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{filename}: expected at most {limit} bytes, got {path.stat().st_size}")
    return content


def parse_json(content: bytes) -> Any:
    """The value of strict JSON: UTF-8, no key twice, at most 64 objects and arrays in each other. ValueError if it is
    not: deeper ones, which no program here writes, are beyond what Python can print, compare or copy.
    """
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return values


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not (level := [one for one in level if isinstance(one, dict | list)]):
            return
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    raise ValueError("it is nested too deeply")
