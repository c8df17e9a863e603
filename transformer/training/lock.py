"""One writer per workdir."""

from __future__ import annotations

import os


class WorkdirInUseError(RuntimeError):
    """Another process writes into this workdir. The message names it and says what to do."""


class WorkdirLock:
    """Context manager that holds `workdir/.lock`; makes the workdir if it is not there.

    Raises WorkdirInUseError when another process holds it (also at once when that is on another host, where nobody can
    tell if it lives). A lock whose process is dead is taken over with a line on stderr. OSError if the workdir cannot be written.
    """

    def __init__(self, workdir: str | os.PathLike): ...

    def acquire(self) -> None: ...

    def release(self) -> None: ...

    def __enter__(self) -> WorkdirLock:
        self.acquire()
        return self

    def __exit__(self, *exc) -> None:
        self.release()
