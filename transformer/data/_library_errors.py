"""Convert errors of the tokenizers library: Rust panics do not derive from `Exception`, and native code prints them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def library_errors(what: str, remedy: str) -> Iterator[None]:
    """Convert all errors of the library, including PanicException, to ValueError("what: message of the error.
    remedy.").
    """
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


@contextlib.contextmanager
def held_stderr() -> Iterator[None]:
    """Buffer the stderr output of native code, and write it after the block.

    If the block raises an error, the output is discarded instead: it is the report of the panic that became this error.
    Only the main thread buffers stderr, because the file descriptor belongs to the whole process, and two threads that
    replace it at the same time could lose the original.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        stderr = os.dup(2)
    except OSError:  # stderr is closed: nothing can be printed
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
    """Return an unnamed temporary file, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()
