"""`python -m transformer convert`: export a model to Hugging Face format."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer.cli._arguments import parse
from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError


@dataclass(frozen=True, kw_only=True)
class Convert(ModelCommand):
    """Export a model to Hugging Face format: write config.json, safetensors and the tokenizer into a new directory.

    A training run is exported as a model family that can represent it; LoRA updates are merged into its weights. With
    --adapter-only, only the updates are exported, in the format of PEFT. A directory of weights is rewritten with
    another dtype or shard size, or with an adapter merged into it.
    """

    output: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="OUT")] = None
    """directory to write; it must be new or empty. Omit it, and pass --verify, to check DIR"""
    family: str | None = None
    """model family to export as; None: its own family, or the first one that can represent the model"""
    adapter_only: bool = False
    """write only the LoRA updates of a run, as adapter_config.json and adapter_model.safetensors"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the weights; None: unchanged"""
    quantize: Literal["int4", "int8"] | None = None
    """quantize the weights: int4 (layers in 4 bits, embeddings and output layer in 8) or int8. Only this program reads
    such files; they take as little memory as on disk"""
    group_size: Literal[32, 64, 128] = 32
    """with --quantize int4: number of weights that share a scale"""
    max_shard_gib: float = 5.0
    """maximum size of one weights file, in GiB; larger weights are split into several files"""
    verify: bool = False
    """load OUT (DIR, if OUT is omitted) and compare its files and the logits of a short input with integrity.json"""


def main(arguments: Sequence[str]) -> None:
    """Export the model; print the files that were written."""
    command = parse(Convert, "convert", arguments)
    if not 0 < command.max_shard_gib < math.inf:
        raise ConfigError(f"--max-shard-gib must be a number above 0, got {command.max_shard_gib}.")
    if command.output is None:
        if not command.verify:
            raise ConfigError(
                "OUT is missing: pass the directory to write. To check an exported DIR instead, pass --verify."
            )
        _verify(command, command.directory)
        return
    from transformer.inference._export import export
    from transformer.inference._loading import is_workdir

    if command.output.is_dir() and any(command.output.iterdir()):  # check before the model is loaded, which takes time
        raise ConfigError(
            f"OUT must be a new or empty directory; {command.output} is not empty. Pass another directory, or empty it."
        )
    if command.adapter_only:
        _write_adapter(command)
        return
    # The reader converts to the dtype: quantized weights were rounded already if it were changed afterwards.
    keeps = command.dtype is None or is_workdir(command.directory)
    opened = command.load() if keeps else command.load(dtype=command.dtype)
    chosen = export(
        opened,
        command.output,
        family=command.family,
        dtype=command.dtype,
        max_shard_bytes=int(command.max_shard_gib * 2**30),
        quantization=None if command.quantize is None else (int(command.quantize[3:]), command.group_size),
    )
    if command.json:
        command.print_json(opened, family=chosen.name, files=[str(path) for path in _files(command.output)])
    else:
        print(f"{chosen.title}: {chosen.citation}")
        _print_files(command.output)
    if command.verify:
        _verify(command, command.output)


def _write_adapter(command: Convert) -> None:
    """Write the LoRA updates of a run; print the files."""
    from transformer.inference._export import export_adapter

    given = {"--verify": command.verify, "--dtype": command.dtype, "--adapter": command.adapter}
    given |= {"--quantize": command.quantize}
    if wrong := [name for name, value in given.items() if value]:
        raise ConfigError(f"--adapter-only writes no weights of a model, which {', '.join(wrong)} needs. Remove one.")
    chosen = export_adapter(command.directory, command.output, step=command.step, family=command.family)
    if command.json:
        values = {"workdir": str(command.directory), "family": chosen.name}
        print(json.dumps(values | {"files": [str(path) for path in _files(command.output)]}, indent=2))
    else:
        print(f"adapter for {chosen.title}")
        _print_files(command.output)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())


def _print_files(directory: Path) -> None:
    for path in _files(directory):
        print(f"{path}  {path.stat().st_size:,} bytes")


def _verify(command: Convert, directory: Path) -> None:
    """Print the largest difference between the logits of an exported directory and the expected logits."""
    from transformer.zoo._pretrained import verify

    if not directory.is_dir():
        raise FileNotFoundError(f"directory {directory} not found. Pass a directory that `convert` wrote.")
    difference = verify(directory)
    if not command.json:
        print(f"{directory}: files unchanged, logits within {difference:.1g} of the expected values")
    elif command.output is None:
        print(json.dumps({"directory": str(directory), "difference": difference}, indent=2))
