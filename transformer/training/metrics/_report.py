"""Lines and files about a run: its devices, its calls, the samples of each evaluation, and a training example."""

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

from transformer.config._replaced_files import replace_file
from transformer.config._untrusted import parse_json, read_bounded
from transformer.data._conversations import marked
from transformer.data._dataset import Dataset
from transformer.viz._records import read_metrics

SAMPLES = "samples.txt"
EXAMPLE = "example.json"
_HEADER = "=== step "


def device_line() -> str:
    """Return a line with the number and kind of the devices of all processes, and the version of JAX."""
    devices = jax.devices()
    kind = devices[0].device_kind
    name = devices[0].platform if kind == devices[0].platform else f"{devices[0].platform} ({kind})"
    of = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"device: {len(devices)} x {name}{of}, jax {jax.__version__}"


def cache_line() -> str:
    """Return a line with the directory of JAX's compilation cache, and how to disable it; "" without a cache."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache:
        return ""
    return f"compiled programs are cached in {folder} (JAX_COMPILATION_CACHE_DIR= turns this off)"


def append_samples(workdir: Path, step: int, text: str) -> None:
    """Append the samples of a step to samples.txt."""
    with open(workdir / SAMPLES, "a", encoding="utf-8") as file:
        file.write(f"{_HEADER}{step} ===\n{text}\n")


def cut_samples(workdir: Path, step: int) -> None:
    """Remove the samples of later steps: a run that resumes from `step` writes them again."""
    path = workdir / SAMPLES
    if not path.exists():
        return
    # surrogateescape preserves bytes that are not valid UTF-8 (written by another program, or by a damaged disk).
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(keepends=True)
    for index, line in enumerate(lines):
        number = line.removeprefix(_HEADER).removesuffix(" ===\n")
        if line.startswith(_HEADER) and number.isdecimal() and int(number) > step:
            replace_file(path, "".join(lines[:index]), errors="surrogateescape")
            return


def read_samples(workdir: str | os.PathLike) -> list[tuple[int, str]]:
    """Return the steps and texts of samples.txt, oldest first; an empty list if the file does not exist."""
    path, found = Path(workdir) / SAMPLES, []
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        number = line.removeprefix(_HEADER).removesuffix(" ===\n")
        if line.startswith(_HEADER) and number.isdecimal():
            found.append((int(number), ""))
        elif found:
            found[-1] = found[-1][0], found[-1][1] + line
    return found


def example_lines(dataset: Dataset) -> str:
    """Return the training example of a dataset with marked trained parts; "" without one."""
    if not dataset.example:
        return ""
    how = "in color" if sys.stdout.isatty() else "in [brackets]"
    return f"a training conversation, with its trained parts {how}:\n{marked(dataset.example)}"


def save_example(workdir: Path, dataset: Dataset) -> None:
    """Write the training example of a dataset with marked trained parts into example.json, if it has one."""
    if dataset.example:
        replace_file(workdir / EXAMPLE, json.dumps(dataset.example) + "\n")


def read_example(workdir: str | os.PathLike) -> list[tuple[str, bool]]:
    """Return what `save_example` wrote; an empty list if there is no such file, or it is damaged."""
    try:
        parts = parse_json(read_bounded(Path(workdir), EXAMPLE))
        return [(str(text), bool(trained)) for text, trained in parts]
    except (OSError, ValueError, TypeError):
        return []


CALLS = "calls.jsonl"
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
    with open(Path(workdir) / CALLS, "a" if step else "w", encoding="utf-8") as file:
        file.write(json.dumps(call) + "\n")


def read_calls(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the recorded calls, oldest first; [] if there is no file. ValueError with the number of a damaged line."""
    path = Path(workdir) / CALLS
    return read_metrics(path) if path.exists() else []
