"""Restart a run in the workdir of an earlier one, and detect runs whose checkpoints are missing."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from transformer.training import _profile as profiling
from transformer.training import _recipe as recipe
from transformer.training.metrics import _report as report
from transformer.training.metrics import _summary as summary
from transformer.training.metrics import _trackers as trackers
from transformer.training.metrics import _writer as metrics
from transformer.training.workdir._manifest import FIRST, find_steps, free_name
from transformer.training.workdir._provenance import TOKENIZER, WorkdirError

AVERAGE = "average.json"
"""file that marks a workdir as an average of checkpoints (`workdir._average`), which can't be resumed"""

PREVIOUS = "previous"
"""directory of a workdir to which `set_aside` moves the files of an earlier run"""

FILES = (
    *("checkpoints", metrics.FILE, "tensorboard", report.SAMPLES, summary.FILE, "loss.png", "forecasts.png"),
    *(profiling.FOLDER, AVERAGE, trackers.FILE, report.CALLS, TOKENIZER, FIRST, recipe.FILE),
)
"""everything that a run writes to its workdir; the files that identify the run come last"""


def has_checkpoints(workdir: str | os.PathLike) -> bool:
    """Return whether the workdir has any checkpoint, valid or not."""
    return bool(find_steps(Path(workdir) / "checkpoints"))


def check_not_lost(workdir: str | os.PathLike) -> None:
    """Raise WorkdirError if a run saved a checkpoint and none is left: a new run would overwrite its metrics."""
    workdir = Path(workdir)
    if has_checkpoints(workdir) or not (workdir / FIRST).exists():
        return
    path = workdir / metrics.FILE
    reached = max((record["step"] for record in metrics.read_metrics(path)), default=0) if path.exists() else 0
    there = [name for name in FILES if (workdir / name).exists() and name not in ("checkpoints", FIRST)]
    up_to = f" with metrics up to step {reached}" if reached else ""
    raise WorkdirError(
        f"{workdir} contains an earlier run{up_to} ({', '.join(there)}), but {workdir / 'checkpoints'} has no "
        f"checkpoint, although {FIRST} shows that one was saved. Put the checkpoints back to resume the run, pass "
        f"--restart (in Python: restart=True) to start a new run (the old files move to {workdir / PREVIOUS}), or pass "
        f"another --workdir."
    )


def set_aside(workdir: str | os.PathLike) -> Path | None:
    """Move the files of an earlier run to a new directory inside its workdir, and return it; None without a run."""
    workdir = Path(workdir)
    if not any((workdir / name).exists() for name in (recipe.FILE, metrics.FILE, report.CALLS, FIRST)):
        return None
    previous = free_name(str(workdir / PREVIOUS))
    previous.mkdir()
    for name in FILES:
        if (workdir / name).exists():
            os.rename(workdir / name, previous / name)
    return previous


@contextlib.contextmanager
def writing_explained(workdir: str | os.PathLike) -> Iterator[None]:
    """Context manager that adds advice to an OSError about a file of the workdir that can't be written."""
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
            f"the run can't write to {workdir}: {error.strerror} ({place}). {remedies[error.errno]}"
        ) from error
