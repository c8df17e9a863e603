"""Progress bars with the time left, on a terminal only."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
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
    """One bar at a time. It appears after `DELAY`, and disappears when its work is done.

    A timer opens the bar: it appears even if the first of few large pieces takes long.
    """

    def __init__(self):
        self._bar: Progress | None = None
        self._timer: threading.Timer | None = None
        self._what = ""
        self._progress: tuple[float, float | None, str] = 0.0, None, ""
        self._lock = threading.Lock()  # the timer has a thread of its own

    def show(self, what: str, done: float, total: float | None, note: str) -> None:
        """Receive the progress; see `transformer.config._progress.Shown`."""
        if what != self._what or (not done and not note):  # new work
            self.close()
            self._what = what
            self._timer = threading.Timer(DELAY, self._open, (what,))
            self._timer.daemon = True
            self._timer.start()
        if total is not None and done >= total:
            self.close()
            return
        with self._lock:
            self._progress = done, total, note
            if self._bar is not None:
                self._bar.update(self._task, completed=done, note=note)

    def _open(self, what: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        note_column = TextColumn("{task.fields[note]}")
        # The elapsed time moves even while a single large piece is computed.
        columns = [TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn()]
        columns.append(TimeRemainingColumn())
        console = Console(file=sys.stderr, force_terminal=True)
        # Results go to stdout, which may be the same terminal: no live display may redirect it.
        bar = Progress(
            *columns, note_column, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        with self._lock:
            if self._timer is not threading.current_thread():
                return  # the work has ended meanwhile
            done, total, note = self._progress
            self._bar, self._task = bar, bar.add_task(what, total=total, completed=done, note=note)
            bar.start()

    def close(self) -> None:
        """Remove the bar, if one is shown."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
