"""Limits of the process, checked before JAX is imported: its C++ libraries abort where memory for them is missing."""

from __future__ import annotations

import os

BASE_BYTES = 1280 * 2**20
"""address space of Python with JAX and its libraries loaded, and what a small model takes"""
BYTES_PER_CORE = 64 * 2**20
"""stacks of the threads that XLA starts for each core"""


class LimitError(RuntimeError):
    """A limit of this process is too low for JAX to start."""


def check_address_space() -> None:
    """Raises LimitError if the limit of the address space (`ulimit -v`) is below what JAX needs to start."""
    try:
        import resource
    except ImportError:  # not Unix
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = BASE_BYTES + BYTES_PER_CORE * (os.cpu_count() or 1)
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        raise LimitError(
            f"too little address space to start JAX: expected at least {needed / 2**30:.1f} GiB, got "
            f"{limit / 2**30:.2f} GiB, the limit of this shell. Raise the limit (ulimit -v unlimited) and try again."
        )
