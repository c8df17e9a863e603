"""Memory allocator settings for training on CPU: the process keeps freed memory for the next step.

The operating system clears every page that it hands out, which costs time at each step.
"""

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
"""never return memory to the system, use huge pages if the system has them, and share four heaps between all threads;
with glibc's default of eight heaps per core, each heap would keep the peak memory of its threads (glibc manual, "Memory
Allocation Tunables")"""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> None:
    """Restart this program in the same process, with an allocator that keeps freed memory.

    A training step frees and allocates hundreds of megabytes; without this setting the system clears these pages at
    every step. docs/benchmarks.md reports the time saved. The restart is necessary because the C library reads its
    settings only when a program starts. Call this function before importing JAX.

    It does nothing if `GLIBC_TUNABLES` or a `MALLOC_` variable is set (`GLIBC_TUNABLES= python ...` disables it), if
    JAX will use a TPU or GPU, in a process that another program started (a notebook), or without glibc. If the system
    refuses the restart, the program continues without the speed-up.
    """
    if any(name == VARIABLE or name.startswith("MALLOC_") for name in environment):
        return
    with contextlib.suppress(OSError):  # the interpreter was deleted, or this user may not read or execute it
        if platform.libc_ver()[0] != "glibc" or not _owns_process() or not _computes_on_cpu(environment):
            return
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, VARIABLE: KEEP})


def _owns_process() -> bool:
    """Return whether the running program is the one that the command line of this process names.

    It is not in a notebook: `%run train.py` runs inside the notebook's kernel, and a restart would end that kernel.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    name = Path(getattr(main, "__file__", None) or "").name if spec is None else spec.name.removesuffix(".__main__")
    return bool(name) and any(word == name or Path(word).name == name for word in sys.orig_argv[1:])


def _computes_on_cpu(environment: Mapping[str, str]) -> bool:
    """Return whether JAX will use the CPU, estimated without importing JAX."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return accelerator_present(environment=environment) == "cpu"
