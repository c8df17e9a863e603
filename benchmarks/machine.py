"""Description of the machine that a measurement ran on, for pages with measurements."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import jax


def machine() -> str:
    """Return devices and host, such as `2 cores of AMD EPYC, 24 GiB` or `4 x NVIDIA A100; 16 cores of ..., 126 GiB`."""
    host = f"{len(os.sched_getaffinity(0))} cores of {_processor()}, {_gibibytes():.0f} GiB"
    devices = jax.devices()
    return host if devices[0].platform == "cpu" else f"{len(devices)} x {devices[0].device_kind}; {host}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gibibytes() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
