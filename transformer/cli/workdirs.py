"""What the verbs about a workdir share: their first arguments, and its model loaded."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from transformer.config import ConfigError

if TYPE_CHECKING:
    from transformer.training.runs import Run


@dataclass(frozen=True, kw_only=True)
class WorkdirCommand:
    """A command about what a training run left."""

    workdir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="WORKDIR")]
    """directory of a training run, such as runs/number_words"""
    step: Literal["best", "newest"] | int = "best"
    """checkpoint: that of the lowest eval loss, the newest, or the one of this step"""
    json: bool = False
    """print one JSON object"""
    debug: bool = False
    """show the traceback of an error"""

    def load(self) -> Run:
        """The run in the workdir. FileNotFoundError and ValueError as `load_run`; ConfigError: it writes no text."""
        if not self.workdir.is_dir():
            raise FileNotFoundError(
                f"there is no directory {self.workdir}. Give the workdir of a training run, such as runs/number_words."
            )
        from transformer.training.runs import load_run

        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of every file it reads
        run = load_run(self.workdir, step=self.step)
        if run.recipe.task not in ("seq2seq", "causal_lm"):
            raise ConfigError(f"{self.workdir} holds a {run.recipe.task}, which reads no prompt and writes no text.")
        return run

    def print_json(self, run: Run, **values: Any) -> None:
        """One JSON object on stdout, in ASCII: any pipe can carry it."""
        print(json.dumps({"workdir": str(self.workdir), "step": run.step, **values}, indent=2))
