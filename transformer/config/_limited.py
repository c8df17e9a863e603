"""Work on untrusted input in other processes, which the system ends at a limit of time or memory.

Code in a library can't be stopped from within its process, and its memory can't be limited there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PROGRAM = Path(__file__).with_name("_limited_worker.py")
AT_A_TIME = 4
"""maximum number of processes that work, or wait for a message"""
OUT_OF_MEMORY = errno.ENOMEM
"""status of a process that ended at the limit of memory"""
_SIGNS = (b"memory allocation of ", b"bad_alloc", b"annot allocate memory", b"MemoryError")
"""what compiled code writes to stderr when the limit of memory ends it"""


class LimitExceededError(Exception):
    """A process needed more than a limit, which the text of the error names, such as "2 seconds"."""


class CrashedError(Exception):
    """A process ended for another reason than a limit; the text of the error says how: "ended with status 1"."""


class _Ending(NamedTuple):
    """How a process ended: its status (the number of a signal is negative), and the end of what it wrote to stderr."""

    status: int
    said: bytes

    def __str__(self) -> str:
        how = f"ended with status {self.status}" if self.status >= 0 else f"was ended by {_signal_name(-self.status)}"
        lines = self.said.decode("utf-8", errors="replace").strip().splitlines()
        return f"{how}: {lines[-1].strip()[:300].rstrip('.')}" if lines else how


class Cancellation:
    """Ends the work on a message from another thread, such as when its client has left."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """End the process that works on the message, now or as soon as there is one."""
        with self._lock:
            self.cancelled = True
            if self._process is not None:
                self._process.kill()

    def watch(self, process: subprocess.Popen | None) -> None:
        """Set the process that `cancel` ends; None: none."""
        with self._lock:
            self._process = process
            if self.cancelled and process is not None:
                process.kill()


class LimitedProcesses:
    """Processes that run a program with limits. They start when they are needed first, and wait for further messages.

    The program is a Python file that imports nothing of this package. Its function `prepare(values)` returns a function
    from a message to an answer, a JSON value, which may take this time, and after `prepare` this memory. Several
    threads can ask at the same time: each uses its own process.
    """

    def __init__(self, program: Path, values: Any, *, seconds: float, most_bytes: int):
        self._settings = {"program": str(program), "values": values, "path": [str(one) for one in sys.path]}
        self._settings |= {"seconds": seconds, "most_bytes": most_bytes}
        self._free = threading.BoundedSemaphore(AT_A_TIME)
        self._idle: deque[subprocess.Popen] = deque()
        self._owner = os.getpid()
        self.close = weakref.finalize(self, _end_all, self._idle)
        """ends the processes that wait"""

    def ask(self, message: Any, cancellation: Cancellation | None = None) -> Any:
        """Return the answer to a message.

        Raises LimitExceededError if it needs more than the limits, or the work was cancelled; CrashedError if the
        process ended for another reason; OSError if no process can be started.
        """
        watched = cancellation or Cancellation()
        with self._free:
            process = self._take()
            watched.watch(process)
            try:
                line = _ask(process, message)
            finally:
                watched.watch(None)
            if not line.endswith(b"\n"):
                self._raise(process, watched.cancelled)
            if self.close.alive and not watched.cancelled:
                self._idle.append(process)
            else:
                _end(process)
        return json.loads(line)

    def _raise(self, process: subprocess.Popen, cancelled: bool) -> NoReturn:
        """Raise the error of a process that ended without an answer."""
        ending = _end(process)
        if ending.status == -signal.SIGALRM:
            raise LimitExceededError(f"{self._settings['seconds']:g} seconds")
        if cancelled or ending.status == OUT_OF_MEMORY or any(sign in ending.said for sign in _SIGNS):
            raise LimitExceededError(f"{self._settings['most_bytes'] // 2**20} MiB of memory")
        raise CrashedError(str(ending))

    def _take(self) -> subprocess.Popen:
        """Return a process that waits, or a new one."""
        if self._owner != os.getpid():  # after a fork, the processes that wait are those of the parent
            self._idle.clear()
            self._owner = os.getpid()
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return self._start()
            if process.poll() is None:
                return process
            _end(process)

    def _start(self) -> subprocess.Popen:
        """Return a new process that is prepared."""
        # A file, because nobody reads a pipe while the process works, and a full pipe would stop it.
        errors = tempfile.TemporaryFile()  # noqa: SIM115  `_end` closes it
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        # Settings of the allocator can reserve much memory at the start, which would not count.
        allocator = ("GLIBC_TUNABLES", "MALLOC_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(allocator)}
        process = subprocess.Popen([sys.executable, "-P", str(PROGRAM)], env=environment, **pipes)
        process.stderr = errors
        if not _ask(process, self._settings):
            name = Path(self._settings["program"]).name
            raise OSError(f"the process that runs {name} {_end(process)}.")
        return process


def _ask(process: subprocess.Popen, message: Any) -> bytes:
    """Send a message and wait for the line of the answer; return nothing if the process has ended."""
    try:
        process.stdin.write(pickle.dumps(message))
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return b""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _end(process: subprocess.Popen) -> _Ending:
    """End a process, and return how it ended."""
    process.kill()  # does nothing if it has ended, but is not yet waited for: its own status stays
    with contextlib.suppress(BrokenPipeError):  # a part of a message that was not read
        process.stdin.close()
    process.stdout.close()
    status = process.wait()
    with process.stderr as errors:
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
        return _Ending(status, errors.read())


def _end_all(idle: deque[subprocess.Popen]) -> None:
    while idle:
        _end(idle.pop())
