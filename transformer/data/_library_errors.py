"""Errors of the tokenizers library as ordinary ones: its panics are no `Exception`, and are printed by native code."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def library_errors(what: str, remedy: str) -> Iterator[None]:
    """Inside, whatever the library raises is a ValueError "what: its message. remedy."; a PanicException, too."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | GeneratorExit):
            raise
        raise ValueError(f"{what}: {error or type(error).__name__}. {remedy}.") from error


@contextlib.contextmanager
def held_stderr() -> Iterator[None]:
    """Hold back what native code writes to stderr inside. If the block raises, drop it, because a panic prints many
    lines before it becomes that error; otherwise write it afterwards.

    Only the main thread does so: the descriptor belongs to the whole process, and two threads that exchange it at the
    same time could lose it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        stderr = os.dup(2)
    except OSError:  # closed: nothing can be printed
        yield
        return
    try:
        with _temporary() as held:
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(stderr, 2)
            held.seek(0)
            if content := held.read():
                os.write(2, content)
    finally:
        os.close(stderr)


def _temporary() -> IO[bytes]:
    """A file without a name; in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()
