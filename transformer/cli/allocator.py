"""Memory that was freed stays with the process: on CPU the next step asks for the same again, and pages cost time."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
KEEP = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000:"
    "glibc.malloc.top_pad=268435456:glibc.malloc.arena_max=4"
)
"""nothing is given back, pages are large where the system has such, and the threads share four heaps: of eight a core,
each would come to keep as much as its threads ever had (glibc manual, "Memory Allocation Tunables")"""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> None:
    """Starts this program once more, as the same process, with an allocator that keeps what is freed: a training step
    frees and takes hundreds of megabytes, whose pages the system would clear each time. docs/benchmarks.md has what it
    saves. The C library reads its settings only when a program starts.

    Does nothing where `GLIBC_TUNABLES` or a `MALLOC_` variable says what the user wants (`GLIBC_TUNABLES= python ...`
    turns it off), without glibc, or where the system refuses the restart: then only the speed-up is missing. Call it
    first of all.
    """
    chosen = any(name == VARIABLE or name.startswith("MALLOC_") for name in environment)
    if chosen or platform.libc_ver()[0] != "glibc":
        return
    with contextlib.suppress(OSError):  # an interpreter that this user may not execute, or that is gone
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, VARIABLE: KEEP})
