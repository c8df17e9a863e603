"""Runs a program and writes down, from inside, what nobody sees from outside: bytes in use, and what JAX compiles.

Usage: python -m reliability.watched FILE train.py WORDS
"""

from __future__ import annotations

import ctypes
import json
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

from transformer.cli._allocator import keep_freed_memory

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's name for the event; a program that comes from a cache on the disk counts, too: it is one more in memory"""
EVERY = 0.23
"""seconds between two counts of what is in use"""


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later (mallinfo(3))."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    )


def bytes_in_use() -> int:
    """What malloc has given out and not been given back. With PYTHONMALLOC=malloc that holds Python's objects, too.

    Raises:
        OSError: the C library is not glibc 2.33 or later.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        raise OSError(
            "bytes in use are counted by mallinfo2, which this C library has not: it takes glibc 2.33 or later"
        )
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


def main(file: str, program: str, *words: str) -> None:
    """Runs the program as if called with these words; it ends this process.

    Each line of the file is a JSON object: `at` (`time.monotonic`, seconds), and `in_use` (bytes) or `compiled` (the
    name of a program of JAX).
    """
    import jax

    out = open(file, "ab", buffering=0)  # noqa: SIM115  the thread writes until the process is gone

    def write(**facts: Any) -> None:
        out.write(json.dumps({"at": round(time.monotonic(), 3)} | facts).encode() + b"\n")

    def heard(event: str, seconds: float, **facts: Any) -> None:
        if event == COMPILED:
            write(compiled=facts.get("fun_name", ""))

    def count() -> None:
        while True:
            write(in_use=bytes_in_use())
            time.sleep(EVERY)

    bytes_in_use()  # else it would be the thread that says so
    jax.monitoring.register_event_duration_secs_listener(heard)
    threading.Thread(target=count, daemon=True).start()
    sys.argv = [program, *words]
    runpy.run_path(program, run_name="__main__")


class Lines:
    """Objects of a file of JSON lines that grows: each time those that are new and whole."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Those since the last call; [] where there is no file yet."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole + end)
        return [json.loads(line) for line in whole.splitlines()]


if __name__ == "__main__":
    keep_freed_memory()  # before JAX, as train.py: it starts anew
    main(*sys.argv[1:])
