"""Checksums of a saved directory, which are compared when the directory is loaded.

`save_pretrained` writes them to a small JSON file, which other programs ignore. Directories without the file are loaded
unchecked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformer.config._checks import shortened
from transformer.config._replaced_files import replace_file
from transformer.config._untrusted import parse_json, read_bounded, regular_file
from transformer.zoo.weights._files import INDEX_FILE, SHOWN
from transformer.zoo.weights._header import WeightsError

INTEGRITY_FILE = "integrity.json"
FORMAT = 1
"""Version of the file format."""
MAX_BYTES = 2**20
"""Maximum size of the file."""
THREADS = 4
"""Number of files that are hashed in parallel."""

_ABOUT = (
    "SHA-256 of the files in this directory, and logits of a short input. transformer-zoo compares the files when it "
    "loads the directory. Delete this file to accept files that were changed on purpose."
)
_DIGEST = re.compile(r"[0-9a-f]{64}")


def write_integrity(directory: str | os.PathLike, example: Mapping[str, Any] | None = None) -> None:
    """Write the checksums of all files directly in the directory, with an example (see `zoo/_example.py`)."""
    directory = Path(directory)
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and path.name != INTEGRITY_FILE)
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda name: _digest(directory / name), names))
    values = {"about": _ABOUT, "format": FORMAT, "files": dict(zip(names, digests, strict=True))}
    values |= {} if example is None else {"example": example}
    replace_file(directory / INTEGRITY_FILE, json.dumps(values, indent=2, allow_nan=False) + "\n")


def read_integrity(directory: str | os.PathLike) -> dict[str, Any] | None:
    """Return the contents of integrity.json, or None if it is missing; raise WeightsError if it is invalid."""
    directory = Path(directory)
    if not os.path.lexists(directory / INTEGRITY_FILE):
        return None
    try:
        values = parse_json(read_bounded(directory, INTEGRITY_FILE, MAX_BYTES))
        _check_layout(values)
    except ValueError as error:
        raise WeightsError(
            f"{directory / INTEGRITY_FILE} cannot be read: {error}. Download the directory again, or delete this "
            f"file to load the directory unchecked."
        ) from None
    return values


def _check_layout(values: object) -> None:
    """Raise ValueError unless `values` is an object with file names, their checksums, and optionally an example."""
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        given = values.get("format") if isinstance(values, dict) else values
        raise ValueError(f"format must be {FORMAT}, got {given!r:.80}")
    files = values.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"files must be an object with names and checksums, got {files!r:.80}")
    for name, digest in files.items():
        if not name or not name.isprintable() or set(name) & set("/\\:") or name.startswith(".."):
            raise ValueError(f"files must name files of the directory, got {name!r:.80}")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"the checksum of {name} must be 64 hexadecimal digits, got {digest!r:.80}")
    if not isinstance(values.get("example", {}), dict):
        raise ValueError(f"example must be an object, got {values['example']!r:.80}")


@contextlib.contextmanager
def checked(directory: str | os.PathLike) -> Iterator[None]:
    """Compare the files of a directory with their checksums in background threads, while the block reads the files.

    Small files are compared before the block starts. If a file differs, that error replaces any error of the block,
    which would be misleading for a damaged file. A directory without checksums is not checked. WeightsError lists the
    files that differ, are missing, or contain weights without a checksum.
    """
    directory = Path(directory)
    values = read_integrity(directory)
    if values is None:
        yield
        return
    files = values["files"]
    large = {name for name in files if name.endswith(".safetensors")}
    faults = [fault for name in files if name not in large and (fault := _fault(directory, name, files[name]))]
    faults += [
        f"{path.name} has no checksum"
        for path in sorted(directory.iterdir())
        if (path.suffix == ".safetensors" or path.name == INDEX_FILE) and path.name not in files
    ]
    if faults:
        raise _error(directory, faults)
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _fault(directory, name, files[name]), sorted(large))
        try:
            yield
        except Exception:
            if faults := list(filter(None, found)):
                raise _error(directory, faults) from None
            raise
        if faults := list(filter(None, found)):
            raise _error(directory, faults)


def _fault(directory: Path, name: str, expected: str) -> str | None:
    """Return the problem with one file, or None."""
    if not os.path.lexists(directory / name):
        return f"{name} is missing"
    try:
        got = _digest(regular_file(directory, name))
    except (ValueError, OSError) as error:
        return f"{name} cannot be read ({error})"
    return None if got == expected else f"{name} has changed: expected SHA-256 {expected}, got {got}"


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _error(directory: Path, faults: list[str]) -> WeightsError:
    return WeightsError(
        f"{directory} has changed since it was saved: {shortened(faults, SHOWN, '; ')}. Nothing was loaded. Download "
        f"the directory again. If the changes are intended, delete {directory / INTEGRITY_FILE} to accept them."
    )
