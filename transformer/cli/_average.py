"""`transformer-zoo average`: average the last checkpoints of a run into a new model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer.cli._arguments import Command, check_least


@dataclass(frozen=True, kw_only=True)
class Average(Command):
    """Average the parameters of the last checkpoints of a run (Vaswani et al. 2017, section 6.1: the last 5 or 20).

    The average is written to a new workdir, which every other command can open. The run itself is not changed.
    """

    workdir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="WORKDIR")]
    """workdir of a training run, such as runs/number_words"""
    last: int
    """number of checkpoints to average; a run keeps its newest --checkpoint.keep-last checkpoints"""
    to: Path | None = None
    """directory to write, which must be new or contain an average; None: WORKDIR-average-LAST"""


def main(command: Average) -> None:
    check_least("last", command.last)
    from transformer.training.workdir._average import average

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every file that it reads
    done = average(command.workdir, command.last, command.to)
    steps = ", ".join(map(str, done.steps))
    line = f"averaged {len(done.steps)} checkpoints of {command.workdir} (steps {steps}): {done.workdir}"
    command.answer([line], {"workdir": str(done.workdir), "of": str(command.workdir), "steps": done.steps})
