"""`transformer-zoo verify`: check an exported model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer.cli._arguments import Command


@dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Compare the files of a directory that `convert` wrote, and the logits of a short input, with integrity.json."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """directory that `convert` wrote"""


def main(command: Verify) -> None:
    from transformer.zoo._pretrained import verify

    if not command.directory.is_dir():
        raise FileNotFoundError(f"directory {command.directory} not found. Pass a directory that `convert` wrote.")
    difference = verify(command.directory)
    line = f"{command.directory}: files unchanged, logits within {difference:.1g} of the expected values"
    command.answer([line], {"directory": str(command.directory), "difference": difference})
