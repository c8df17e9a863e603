"""Check the limits of the process before importing JAX: its C++ libraries abort if they can't allocate memory."""

from __future__ import annotations

import os

BASE_BYTES = 1280 * 2**20
"""address space that Python needs with JAX loaded and a small model"""
BYTES_PER_CORE = 64 * 2**20
"""address space of the stacks of the threads that XLA starts for each core"""


class LimitError(RuntimeError):
    """A limit of this process is too low for JAX to start."""


def check_address_space() -> None:
    """Raise LimitError if the limit of the address space (`ulimit -v`) is too low for JAX to start."""
    try:
        import resource
    except ImportError:  # not Unix
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed = BASE_BYTES + BYTES_PER_CORE * (os.cpu_count() or 1)
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        raise LimitError(
            f"address space limit too low to start JAX: expected at least {needed / 2**30:.1f} GiB, got "
            f"{limit / 2**30:.2f} GiB, the limit of this shell. Raise the limit (ulimit -v unlimited) and try again."
        )
