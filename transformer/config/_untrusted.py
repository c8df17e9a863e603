"""Read files of an untrusted directory: only regular files inside it, up to a maximum size, with strict JSON.

A symbolic link may point to a regular file in the directory itself or, in `snapshots/REVISION/` of the Hugging Face
cache (which consists of such links), to `blobs/` of the same model. All other links are rejected: otherwise the author
of the directory could choose any file of the user who opens it. Pipes and devices are rejected because reading them can
block forever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from transformer.config._checks import ConfigError

MAX_JSON_BYTES = 64 * 2**20
"""default maximum size of a JSON file, in bytes"""
MOST_LINE_BYTES = 16 * 2**20
"""default maximum size of a line of text, in bytes"""
MAX_DEPTH = 64
"""maximum nesting depth of objects and arrays in a JSON file"""


def regular_file(directory: Path, filename: str) -> Path:
    """Return the path of a regular file in the directory, such as "a.json" or "b/a.json".

    Raises ValueError if it is missing or no regular file, or if its name or a link leads outside of the directory.
    """
    name = PurePosixPath(filename)
    if name.is_absolute() or ".." in name.parts or "\\" in filename or "\0" in filename:
        raise ValueError(f"{filename!r} must be the name of a file in the directory")
    path, home = directory / filename, directory.resolve()
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # before Python 3.13, a loop of links raises RuntimeError
        raise ValueError(f"{filename} is missing or a broken link: get the file again") from None
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(
            f"{filename} is a link to {target}, outside of the directory: replace the link by the file itself"
        )
    if not target.is_file():
        raise ValueError(f"{filename} must be a regular file; a directory, pipe or device is not read")
    return path


def read_bounded(directory: Path, filename: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a `regular_file`; raise ValueError if it has more than `limit` bytes."""
    path = regular_file(directory, filename)
    with path.open("rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{filename}: expected at most {limit} bytes, got {path.stat().st_size}")
    return content


def bounded_lines(file: BinaryIO, name: str, limit: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file, with their ends, as far as they are read: a device can have a line without an end.

    Raises ValueError, with the `name` of the file, for a line of more than `limit` bytes.
    """
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise ValueError(
                f"line {number} of {name} has more than {limit:,} bytes: expected lines of text. Check the input, or "
                "divide this line."
            )
        yield line


def parse_json(content: bytes) -> Any:
    """Parse strict JSON: UTF-8, no duplicate keys, at most `MAX_DEPTH` levels of objects and arrays.

    The depth is limited because Python can't print, compare or copy values that are nested very deeply. Raises
    ValueError for other content.
    """
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not valid UTF-8") from None
    except RecursionError:
        raise ValueError("its objects and arrays are nested too deeply: expected at most 64 levels") from None
    _check_depth(value)
    return value


def read_json_object(
    directory: Path, filename: str, remedy: str = "Download it again.", error: type[ValueError] = ConfigError
) -> dict[str, Any]:
    """Return the object in a JSON file; raise `error`, with the remedy, if it can't be read or holds another value."""
    try:
        value = parse_json(read_bounded(directory, filename))
    except ValueError as cause:
        raise error(f"{directory / filename} can't be read: {cause}. {remedy}") from cause
    if not isinstance(value, dict):
        raise error(f"{directory / filename} must be a JSON object, got {value!r:.80}. {remedy}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"duplicate key {twice!r:.80}")
    return values


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not (level := [one for one in level if isinstance(one, dict | list)]):
            return
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    raise ValueError("its objects and arrays are nested too deeply: expected at most 64 levels")
