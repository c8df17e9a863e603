"""Memory that was freed stays with the process: on CPU the next step asks for the same again, and pages cost time."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from transformer.cli._devices import accelerator_present

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

    Does nothing if `GLIBC_TUNABLES` or a `MALLOC_` variable is set (`GLIBC_TUNABLES= python ...` turns it off), if JAX
    will compute on a TPU or GPU, in a process that another program started (a notebook), without glibc, or if the
    system refuses the restart: then only the speed-up is missing. Call it before JAX is imported.
    """
    chosen = any(name == VARIABLE or name.startswith("MALLOC_") for name in environment)
    if chosen or platform.libc_ver()[0] != "glibc" or not _owns_process() or not _computes_on_cpu(environment):
        return
    with contextlib.suppress(OSError):  # an interpreter that this user may not execute, or that is gone
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, VARIABLE: KEEP})


def _owns_process() -> bool:
    """Whether the program that runs is the one that the command line of this process names. In a notebook, `%run
    train.py` runs another file than the one that Python was started with: a restart would end the notebook's kernel.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    name = Path(getattr(main, "__file__", None) or "").name if spec is None else spec.name.removesuffix(".__main__")
    return bool(name) and any(word == name or Path(word).name == name for word in sys.orig_argv[1:])


def _computes_on_cpu(environment: Mapping[str, str]) -> bool:
    """Whether JAX will compute on the CPU, as far as can be seen without importing it."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return accelerator_present(environment=environment) == "cpu"
