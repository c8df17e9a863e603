"""Progress bars with the time left, on a terminal only."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from transformer.config._progress import showing

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY = 2.0
"""seconds of work before a bar appears"""


@contextlib.contextmanager
def bars() -> Iterator[None]:
    """Show the progress of long work (`transformer.config._progress`) on stderr, if it is a terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", ""):
        yield
        return
    shown = _Bars()
    try:
        with showing(shown.show):
            yield
    finally:
        shown.close()


class _Bars:
    """One bar at a time. It appears after `DELAY`, and disappears when its work is done."""

    def __init__(self):
        self._bar: Progress | None = None
        self._what, self._began = "", 0.0

    def show(self, what: str, done: float, total: float | None, note: str) -> None:
        """Receive the progress; see `transformer.config._progress.Shown`."""
        if what != self._what or (not done and not note):  # new work
            self.close()
            self._what, self._began = what, time.monotonic()
        if total is not None and done >= total:
            self.close()
        elif self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._began >= DELAY:
            self._open(done, total, note)

    def _open(self, done: float, total: float | None, note: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        note_column = TextColumn("{task.fields[note]}")
        columns = [TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()]
        console = Console(file=sys.stderr, force_terminal=True)
        # Results go to stdout, which may be the same terminal: no live display may redirect it.
        self._bar = Progress(
            *columns, note_column, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task(self._what, total=total, completed=done, note=note)
        self._bar.start()

    def close(self) -> None:
        """Remove the bar, if one is shown."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
