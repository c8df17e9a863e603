"""Files that are replaced atomically, and files to which records are appended without a buffer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def replace_text(path: Path, text: str, errors: str = "strict") -> Path:
    """Write a file atomically, in UTF-8: a killed process leaves the old or the new content. Returns the path."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors=errors)
    os.replace(partial, path)
    return path


class AppendedFile:
    """File that is open for appending, without a buffer; created if it does not exist.

    A record is in the file as soon as `write` returns. A failed write leaves no buffer that would fail again when the
    file is closed. All errors of the system are OSErrors with the path and the remedy.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()

    def write(self, content: bytes) -> None:
        """Append the content. Raises OSError, for example if the disk is full."""
        with self._explained():
            while content:  # on a nearly full disk, `write` may write only a part
                content = content[self._file.write(content) :]

    def sync(self) -> None:
        """Flush the file to disk. Raises OSError."""
        with self._explained():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "free some space or choose another workdir, then rerun the command"
            raise OSError(error.errno, f"{error.strerror}; {remedy}", str(self._path)) from error
