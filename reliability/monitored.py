"""Run a program and record values that can't be measured externally: allocated bytes and programs compiled by JAX.

Usage: python -m reliability.monitored FILE train.py ARGUMENTS
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
"""JAX's name of the event; a program read from the compilation cache also counts, because it takes memory"""
EVERY = 0.23
"""seconds between two measurements of the allocated bytes"""


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
    """Return the bytes allocated by malloc and not freed. With PYTHONMALLOC=malloc this includes Python objects.

    Raises:
        OSError: the C library is not glibc 2.33 or later.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        raise OSError("counting allocated bytes needs mallinfo2, which this C library lacks. Use glibc 2.33 or later.")
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


def main(file: str, program: str, *words: str) -> None:
    """Run the program in this process with these arguments, and write records to the file.

    Each line of the file is a JSON object with `at` (`time.monotonic`, seconds) and either `in_use` (bytes) or
    `compiled` (name of a program compiled by JAX).
    """
    import jax

    out = open(file, "ab", buffering=0)  # noqa: SIM115  the thread writes until the process ends

    def write(**facts: Any) -> None:
        out.write(json.dumps({"at": round(time.monotonic(), 3)} | facts).encode() + b"\n")

    def heard(event: str, seconds: float, **facts: Any) -> None:
        if event == COMPILED:
            write(compiled=facts.get("fun_name", ""))

    def count() -> None:
        while True:
            write(in_use=bytes_in_use())
            time.sleep(EVERY)

    bytes_in_use()  # raise the OSError here rather than in the thread
    jax.monitoring.register_event_duration_secs_listener(heard)
    threading.Thread(target=count, daemon=True).start()
    sys.argv = [program, *words]
    runpy.run_path(program, run_name="__main__")


class Lines:
    """Read new complete lines of a growing JSON lines file."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Return the objects added since the last call; [] if the file does not exist yet."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole + end)
        return [json.loads(line) for line in whole.splitlines()]


if __name__ == "__main__":
    keep_freed_memory()  # before importing JAX, as in train.py, because it restarts the process
    main(*sys.argv[1:])
