"""Runs whose checkpoints are gone, and beginning anew in the workdir of an earlier run."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from transformer.config._checks import ConfigError
from transformer.training import _invocations as calls
from transformer.training import _metrics as metrics
from transformer.training import _profiling as profiling
from transformer.training import _recipe as recipe
from transformer.training import _report as report
from transformer.training import _summary as summary
from transformer.training._manifest import FIRST, find_steps, free_name
from transformer.training._provenance import TOKENIZER, WorkdirError

AVERAGE = "average.json"
"""file that tells an average of checkpoints (`averaging`) from a run that can be resumed"""

PREVIOUS = "previous"
"""directory of a workdir that `set_aside` moves an earlier run into"""

FILES = (
    *("checkpoints", metrics.FILE, "tensorboard", report.SAMPLES, summary.FILE, "loss.png", "forecasts.png"),
    *(profiling.FOLDER, AVERAGE, calls.FILE, TOKENIZER, FIRST, recipe.FILE),
)
"""everything that a run writes into its workdir; what tells most about it comes last"""


def has_checkpoints(workdir: str | os.PathLike) -> bool:
    """Whether there is any checkpoint, valid or not."""
    return bool(find_steps(Path(workdir) / "checkpoints"))


def check_not_lost(workdir: str | os.PathLike) -> None:
    """Raises WorkdirError if a run saved a checkpoint here and none is left: a new run would overwrite its metrics.

    A run that was killed before its first checkpoint passes. A workdir records its first checkpoint in a file of its
    own; of runs by earlier versions, which lack the file, other files tell.
    """
    workdir = Path(workdir)
    if has_checkpoints(workdir):
        return
    reached = _last_step(workdir)
    why = _saved_before(workdir, reached)
    if why is None:
        return
    there = [name for name in FILES if (workdir / name).exists() and name not in ("checkpoints", FIRST)]
    up_to = f" with metrics up to step {reached}" if reached else ""
    raise WorkdirError(
        f"{workdir} holds an earlier run{up_to} ({', '.join(there)}), but no checkpoint in {workdir / 'checkpoints'}, "
        f"though {why}. Put the checkpoints back to resume the run, pass --restart (in Python: restart=True) to begin "
        f"anew (its files move to {workdir / PREVIOUS}), or give another --workdir."
    )


def _saved_before(workdir: Path, reached: int) -> str | None:
    """How it is known that a checkpoint was saved here; None if it is not."""
    if (workdir / FIRST).exists():
        return f"{FIRST} says that one was saved"
    if (workdir / summary.FILE).exists():
        return f"{summary.FILE} says that the run ended"
    if not (workdir / recipe.FILE).exists():
        return f"{recipe.FILE} is missing, too" if reached else None
    with contextlib.suppress(ValueError):  # a damaged file tells nothing
        if step := max((call["step"] for call in calls.read_calls(workdir)), default=0):
            return f"{calls.FILE} says that it resumed from step {step}"
    with contextlib.suppress(ConfigError):
        old = recipe.load_recipe(workdir)
        every = old.checkpoint.every or old.evaluation.every or old.training.steps
        # A save waits for the one before it: after step 2n the checkpoint of step n is complete.
        if reached > 2 * every:
            return f"it saved one every {every} steps"
    return None


def _last_step(workdir: Path) -> int:
    """The last step in metrics.jsonl; 0 without any."""
    path = workdir / metrics.FILE
    return max((record["step"] for record in metrics.read_metrics(path)), default=0) if path.exists() else 0


def set_aside(workdir: str | os.PathLike) -> Path | None:
    """Moves the files of an earlier run into a new directory of its workdir, which is a workdir itself, and gives that;
    None where there is no run. Files that no run writes stay.
    """
    workdir = Path(workdir)
    if not any((workdir / name).exists() for name in (recipe.FILE, metrics.FILE, calls.FILE, FIRST)):
        return None
    previous = free_name(str(workdir / PREVIOUS))
    previous.mkdir()
    for name in FILES:
        if (workdir / name).exists():
            os.rename(workdir / name, previous / name)
    return previous


@contextlib.contextmanager
def writing_explained(workdir: str | os.PathLike) -> Iterator[None]:
    """Inside, a file of the workdir that cannot be written is an OSError that says what this means for the run."""
    root, resume = Path(os.path.abspath(workdir)), "rerun the command: it resumes from the newest checkpoint"
    remedies = {
        **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), f"Make it writable, then {resume}."),
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"Free some space, then {resume}."),
    }
    try:
        yield
    except OSError as error:
        known = error.errno in remedies and error.strerror == os.strerror(error.errno) and error.filename is not None
        if not known or root not in (path := Path(os.path.abspath(os.fsdecode(error.filename)))).parents:
            raise
        place = path.relative_to(root)
        raise OSError(
            f"the run cannot write to {workdir}: {error.strerror} ({place}). {remedies[error.errno]}"
        ) from error
