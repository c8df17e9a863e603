"""The calls of `train` that made a run: when, from which step, by which command, with what. A report tells of them."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax

from transformer.viz._records import read_metrics

FILE = "calls.jsonl"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain", "tensorflow-datasets", "tokenizers")
"""whose versions may change what a run does"""


def versions() -> dict[str, str]:
    """Versions of Python, of this project and of the packages that are there, by name."""
    here = sys.modules[__name__.partition(".")[0]]  # above this level, and imported by now
    found = {"python": platform.python_version(), "transformer-zoo": here.__version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def record_call(workdir: str | os.PathLike, step: int, command: str, device: str) -> None:
    """Adds a call that goes on from `step` to `workdir/calls.jsonl`; one from step 0 begins the file."""
    call = {
        "step": step,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": device,
        "processes": jax.process_count(),
        "versions": versions(),
    }
    with open(Path(workdir) / FILE, "a" if step else "w", encoding="utf-8") as file:
        file.write(json.dumps(call) + "\n")


def read_calls(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The calls, oldest first; none where nothing was recorded.

    Raises:
        ValueError: a line that is none; the message names it.
    """
    path = Path(workdir) / FILE
    return read_metrics(path) if path.exists() else []
