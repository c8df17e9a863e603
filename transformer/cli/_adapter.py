"""`transformer-zoo adapter`: export the LoRA updates of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer.cli._arguments import Command
from transformer.cli._convert import check_output, written


@dataclass(frozen=True, kw_only=True)
class Adapter(Command):
    """Export the LoRA updates of a run, without the weights that they change, in PEFT's format: write
    adapter_config.json and adapter_model.safetensors into a new directory.
    """

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="WORKDIR")]
    """workdir of a run with LoRA"""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """directory to write; it must be new or empty"""
    step: Literal["best", "newest"] | int = "best"
    """checkpoint: best (held-out loss, or accuracy of a classifier), newest, or a step number"""
    family: str | None = None
    """model family to export as; None: its own family, or the first one that can represent the model"""


def main(command: Adapter) -> None:
    check_output(command.output)
    from transformer.inference._export import export_adapter

    chosen = export_adapter(command.directory, command.output, step=command.step, family=command.family)
    names, lines = written(command.output)
    values = {"workdir": str(command.directory), "family": chosen.name, "files": names}
    command.answer([f"adapter for {chosen.title}", *lines], values)
