"""Standard streams and terminal width: UTF-8 in every locale, and a clear error if stdout is closed."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from transformer.config._checks import ConfigError

PATIENCE = 1.0
"""seconds that a command waits for the first byte of a pipe without a word"""
NARROWEST = 20
"""minimum terminal width in columns; with fewer, formatting the `--help` text would not terminate"""


def prepare_streams() -> None:
    """Set stdin, stdout and stderr to UTF-8, regardless of the locale and of PYTHONIOENCODING, and the terminal width
    to at least `NARROWEST` columns. A closed stderr is replaced by the null device.

    Raises:
        OSError: stdout is closed. The next file that the program opens would get its descriptor, and everything that a
            C library prints would be written into that file.
    """
    for stream, errors in ((sys.stdin, None), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # closed, replaced, or already read from
            stream.reconfigure(encoding="utf-8", errors=errors)
    if sys.stderr is None:
        redirect_to_null(2)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115  stays open until the process exits
    if sys.stdout is None:
        raise OSError(
            errno.EBADF, "stdout is closed, so the output has nowhere to go. Redirect it: > FILE, or > /dev/null"
        )
    if os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) == 0:
        del os.environ["COLUMNS"]  # Python interprets 0 as unknown, but rich as a width of zero columns
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)  # tyro, rich and argparse read this variable


def decode_argument(text: str) -> str:
    """Decode a command-line argument as UTF-8. An argument that is not UTF-8 is returned unchanged.

    In the C locale, Python decodes non-ASCII bytes of arguments as lone surrogates.
    """
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def open_input(path: Path, content: str) -> BinaryIO:
    """Open an input file with this content, a word for messages, and wait until a named pipe has something to read.

    Nobody may write into a named pipe yet. Then a line on stderr says that the command waits for it.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise ConfigError(f"{path} must be a file or a pipe with {content}; a directory or device is not read.")
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115  closed by the caller
    if stat.S_ISFIFO(mode) and not select.select([file], [], [], PATIENCE)[0]:
        print(f"waiting for {content} from the pipe {path}", file=sys.stderr, flush=True)
        select.select([file], [], [])
    os.set_blocking(file.fileno(), True)
    return file


def redirect_to_null(descriptor: int) -> None:
    """Redirect a file descriptor, which may be closed, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
