"""Paths of files and directories, which must be local: a remote address is refused before anything is created.

`pathlib` turns "s3://bucket/x" into the relative path "s3:/bucket/x", so that a program that only converts it writes
into a local directory named "s3:".
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

from transformer.config._checks import ConfigError

# RFC 3986, section 3.1. A single letter is a drive of Windows.
_SCHEME = r"[a-zA-Z][a-zA-Z0-9+.-]+"
_REMOTE = re.compile(rf"({_SCHEME})://")
_SHORTENED = re.compile(rf"({_SCHEME}):/")
"""an address after its conversion to a `pathlib` path, which removes the second slash"""


def is_remote(path: str | os.PathLike) -> bool:
    """Return whether a path starts with a scheme, such as s3:// or https://."""
    return _found(path) is not None


def local_path(path: str | os.PathLike, name: str) -> Path:
    """Return a `pathlib.Path`; raise ConfigError, naming the option or argument `name`, for a path with a scheme."""
    if (found := _found(path)) is not None:
        address = os.fspath(path)
        if isinstance(path, PurePath):
            address = f"{found[1]}://{address[found.end() :]}"
        if found[1].lower() in ("http", "https"):
            raise ConfigError(
                f"{name} must be a local path, but {address:.200} is a URL, and URLs are not downloaded. Download the "
                f"file, and pass its path."
            )
        raise ConfigError(
            f"{name} must be a local path, but remote paths ({found[1]}://) are not supported, got {address:.200}. "
            f"Mount the storage as a directory, or copy the files, and pass the local path."
        )
    return Path(path)


def _found(path: str | os.PathLike) -> re.Match[str] | None:
    """Match the scheme at the start of a path."""
    return (_SHORTENED if isinstance(path, PurePath) else _REMOTE).match(os.fspath(path))
