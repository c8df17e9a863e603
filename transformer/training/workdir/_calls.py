"""Log of the calls of `train` in a workdir: time, first step, command, device and package versions, for the report."""

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
"""packages whose versions may change the results of a run"""


def versions() -> dict[str, str]:
    """Return the versions of Python, of this project and of the installed `PACKAGES`, by name."""
    here = sys.modules[__name__.partition(".")[0]]  # in a higher layer, and already imported
    found = {"python": platform.python_version(), "transformer-zoo": here.__version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def record_call(workdir: str | os.PathLike, step: int, command: str, device: str) -> None:
    """Append a call that resumes at `step` to `workdir/calls.jsonl`. A call at step 0 starts a new file."""
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
    """Return the recorded calls, oldest first; [] if there is no file. ValueError with the number of a damaged line."""
    path = Path(workdir) / FILE
    return read_metrics(path) if path.exists() else []
