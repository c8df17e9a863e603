"""Lines and files about a run: its devices, the samples of each evaluation, and a training example."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax

from transformer.config._untrusted import parse_json, read_bounded
from transformer.data._conversations import marked
from transformer.data._dataset import Dataset
from transformer.training._files import replace_text

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
            replace_text(path, "".join(lines[:index]), errors="surrogateescape")
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
        replace_text(workdir / EXAMPLE, json.dumps(dataset.example) + "\n")


def read_example(workdir: str | os.PathLike) -> list[tuple[str, bool]]:
    """Return what `save_example` wrote; an empty list if there is no such file, or it is damaged."""
    try:
        parts = parse_json(read_bounded(Path(workdir), EXAMPLE))
        return [(str(text), bool(trained)) for text, trained in parts]
    except (OSError, ValueError, TypeError):
        return []
