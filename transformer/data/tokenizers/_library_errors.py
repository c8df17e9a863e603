"""Convert errors of the tokenizers library: Rust panics do not derive from `Exception`, and native code prints them."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def library_errors(what: str, remedy: str) -> Iterator[None]:
    """Convert all errors of the library, including PanicException, to ValueError("what: its message. remedy.")."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | GeneratorExit):
            raise
        if "Missing [UNK]" in str(error):  # tokenizers: a WordLevel vocabulary without an unknown token
            raise ValueError(
                "the text has a word or character that is not in the tokenizer's vocabulary, which has no unknown "
                "token. Remove it."
            ) from error
        raise ValueError(f"{what}: {error or type(error).__name__}. {remedy}.") from error


class _Held:
    """The buffer in place of stderr, which all threads that are in a block of `held_stderr` share."""

    def __init__(self):
        self._lock = threading.Lock()
        self._blocks, self._failed = 0, False
        self._buffer: IO[bytes] | None = None
        self._stderr = -1

    def enter(self) -> None:
        """Begin a block; the first one replaces stderr."""
        with self._lock:
            if self._blocks == 0:
                self._failed, self._buffer = False, None
                self._replace_stderr()
            self._blocks += 1

    def _replace_stderr(self) -> None:
        try:
            self._stderr = os.dup(2)
        except OSError:  # it is closed: nothing can be printed
            return
        self._buffer = _temporary()
        os.dup2(self._buffer.fileno(), 2)

    def leave(self, failed: bool) -> None:
        """End a block; the last one restores stderr, and writes what was printed without the reports of panics."""
        with self._lock:
            self._blocks -= 1
            self._failed |= failed
            if self._blocks or self._buffer is None:
                return
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            with self._buffer as buffer:
                buffer.seek(0)
                content = buffer.read()
            if self._failed:
                content = _PANIC.sub(b"", content) if _PANIC.search(content) else b""
            if content:
                os.write(2, content)


_HELD = _Held()
_PANIC = re.compile(
    rb"\n?thread '.*?panicked at .*?(?:^note: .*?RUST_BACKTRACE.*?(?:\n|\Z)|(?=^thread ')|\Z)", re.S | re.M
)
"""the report of a panic of Rust: up to its last line, which it has only if it is the first one or has a backtrace"""


@contextlib.contextmanager
def held_stderr() -> Iterator[None]:
    """Buffer the stderr output of native code, and write it after the block.

    If the block raises an error, the report of the panic that became this error is discarded, or all output if it has
    no such report. The file descriptor belongs to the whole process: what other threads print meanwhile is written
    after the block, too, and threads whose blocks overlap share the buffer.
    """
    _HELD.enter()
    failed = True
    try:
        yield
        failed = False
    finally:
        _HELD.leave(failed)


def _temporary() -> IO[bytes]:
    """Return an unnamed temporary file, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()
