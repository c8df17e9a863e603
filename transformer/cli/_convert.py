"""`transformer-zoo convert`: export a model to Hugging Face format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer.cli._models import ModelCommand, QuantizationOptions
from transformer.config._checks import ConfigError


@dataclass(frozen=True, kw_only=True)
class Convert(QuantizationOptions, ModelCommand):
    """Export a model to Hugging Face format: write config.json, safetensors and the tokenizer into a new directory.

    A training run is exported as a model family that can represent it; LoRA updates are merged into its weights. A
    directory of weights is rewritten with another dtype or shard size, or with an adapter merged into it. Only this
    program reads quantized weights; they take as little memory as on disk.
    """

    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """directory to write; it must be new or empty"""
    family: str | None = None
    """model family to export as; None: its own family, or the first one that can represent the model"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the weights; None: unchanged"""
    max_shard_gib: float = 5.0
    """maximum size of one weights file, in GiB; larger weights are split into several files"""


def main(command: Convert) -> None:
    if not 0 < command.max_shard_gib < math.inf:
        raise ConfigError(f"--max-shard-gib must be a number above 0, got {command.max_shard_gib}.")
    quantization = command.quantization()
    from transformer.inference._export import export
    from transformer.inference._load import is_workdir

    check_output(command.output)
    # The reader converts to the dtype: quantized weights were rounded already if it were changed afterwards.
    keeps = command.dtype is None or is_workdir(command.directory)
    opened = command.load() if keeps else command.load(dtype=command.dtype)
    chosen = export(
        opened,
        command.output,
        family=command.family,
        dtype=command.dtype,
        max_shard_bytes=int(command.max_shard_gib * 2**30),
        quantization=quantization,
    )
    names, lines = written(command.output)
    command.answer_of(opened, [f"{chosen.title}: {chosen.citation}", *lines], family=chosen.name, files=names)


def check_output(directory: Path) -> None:
    """Raise ConfigError for a directory with files, before the model is loaded, which takes time."""
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(
            f"OUT must be a new or empty directory; {directory} is not empty. Pass another directory, or empty it."
        )


def written(directory: Path) -> tuple[list[str], list[str]]:
    """Return the paths of the files in a directory, and lines with their sizes."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return [*map(str, files)], [f"{path}  {path.stat().st_size:,} bytes" for path in files]
