"""Standard streams and terminal width: UTF-8 in every locale, and a clear answer where stdout is closed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys

NARROWEST = 20
"""columns that are assumed at least: below that the layout of `--help` would not end"""


def prepare_streams() -> None:
    """Make stdin, stdout and stderr UTF-8, whatever the locale and PYTHONIOENCODING say, and assume `NARROWEST` columns
    at least. A stderr that is closed becomes the null device.

    Raises:
        OSError: stdout is closed. The next file that the program opens would take its descriptor, and everything that a
            C library prints would be written into that file.
    """
    for stream, errors in ((sys.stdin, None), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # closed, replaced, or already read from
            stream.reconfigure(encoding="utf-8", errors=errors)
    if sys.stderr is None:
        _open_null_as_stderr()
    if sys.stdout is None:
        raise OSError(
            errno.EBADF, "stdout is closed, so the output has nowhere to go. Redirect it: > FILE, or > /dev/null"
        )
    if os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) == 0:
        del os.environ["COLUMNS"]  # which Python takes as unknown, and rich as no columns
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)  # read by all that lays out text: tyro, rich, argparse


def decode_argument(text: str) -> str:
    """The text of a command-line argument as UTF-8: in the C locale Python reads other bytes than ASCII as lone
    surrogates. An argument that is not UTF-8 stays as it is.
    """
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def _open_null_as_stderr() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null != 2:
        os.dup2(null, 2)
        os.close(null)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115  for good
