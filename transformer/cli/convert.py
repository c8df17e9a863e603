"""`python -m transformer convert`: a model as the files that everybody reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer.cli.arguments import parse
from transformer.cli.models import ModelCommand
from transformer.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Convert(ModelCommand):
    """Writes config.json, safetensors and the tokenizer of a model into a new directory: of a training run, as the
    family that the model equals; of weights, the same in another type or other shards.
    """

    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """directory to write; it must not exist, or be empty"""
    family: str | None = None
    """as which family; None: its own, or the first that has all that the model has"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """type of the numbers; None: as they are"""
    max_shard_gib: float = 5.0
    """size from which the weights are split into several files"""


def main(arguments: Sequence[str]) -> None:
    """Prints the files that were written."""
    command = parse(Convert, "convert", arguments)
    if not 0 < command.max_shard_gib < math.inf:
        raise ConfigError(f"--max-shard-gib must be a number above 0, got {command.max_shard_gib}.")
    from transformer.inference import export

    if command.output.is_dir() and any(command.output.iterdir()):  # before a model is read
        raise ConfigError(f"{command.output} is not empty: nothing is overwritten. Name a new directory, or empty it.")
    opened = command.load()
    chosen = export(
        opened,
        command.output,
        family=command.family,
        dtype=command.dtype,
        max_shard_bytes=int(command.max_shard_gib * 2**30),
    )
    files = sorted(path for path in command.output.iterdir() if path.is_file())
    if command.json:
        command.print_json(opened, family=chosen.name, files=[str(path) for path in files])
        return
    print(f"{chosen.title}: {chosen.citation}")
    for path in files:
        print(f"{path}  {path.stat().st_size:,} bytes")
