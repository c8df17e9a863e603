"""Compile grammars of clients in other processes first, which the system ends at a limit of time or memory.

A JSON schema of 73 bytes can need gigabytes and minutes, and a compilation can't be stopped from within its process. A
compiled grammar can't be sent to another process either. So a process of its own proves that a grammar compiles
within the limits; then this process compiles it again, which costs the same and no more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 2.0
"""time in which a grammar must compile"""
MOST_BYTES = 24 * 2**20
"""memory that a compiled grammar may need; an object of 2,000 properties needs 18 MB"""
LIMITS = {"max_lexer_states": 10_000}
"""limits of llguidance other than its defaults: a text with more states than these ends with an error. A state needs 1
to 2 kB"""
MOST_IDLE = 4
"""maximum number of processes that are kept for the next grammar"""
PROGRAM = Path(__file__).with_name("_grammar_worker.py")


class Cancellation:
    """Ends the check of a grammar from another thread, such as when its client has left."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """End the process of the check, now or as soon as it has one."""
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


class GrammarChecks:
    """Checks whether grammars compile within the limits, in processes that are started when they are needed first.

    Several threads can check at the same time: each uses a process of its own.

    Args:
        tokens: the bytes of each token id.
        special_ids: ids of the special tokens.
        bos_id: id of the token that begins a text; None: there is none.
        end_ids: ids that end a text, at least one.
    """

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], bos_id: int | None, end_ids: Sequence[int]):
        # Latin-1 has a character for each byte.
        settings: dict[str, Any] = {"tokens": [token.decode("latin-1") for token in tokens], "bos_id": bos_id}
        settings["special_ids"] = list(special_ids)
        settings |= {"end_ids": list(end_ids), "path": [str(one) for one in sys.path], "limits": LIMITS}
        self._settings = settings | {"seconds": SECONDS, "most_bytes": MOST_BYTES}
        self._idle: deque[subprocess.Popen] = deque()
        self.close = weakref.finalize(self, _end_all, self._idle)
        """ends the processes that wait"""

    def reason_against(self, grammar: str, cancellation: Cancellation) -> str | None:
        """Return why a grammar must not be compiled in this process; None: it compiles within the limits, or fails.

        Raises:
            OSError: no process can be started.
        """
        process = self._start() if not self._idle else self._idle.popleft()
        cancellation.watch(process)
        try:
            answered = _ask(process, grammar)
        finally:
            cancellation.watch(None)
        if not answered:
            status = _end(process)
            if cancellation.cancelled:
                return "its check was cancelled"
            if status == -signal.SIGALRM:
                return f"it does not compile within {SECONDS:g} seconds. Simplify it"
            return f"it does not compile within {MOST_BYTES // 2**20} MiB of memory. Simplify it"
        if len(self._idle) < MOST_IDLE and self.close.alive:
            self._idle.append(process)
        else:
            _end(process)
        return None

    def _start(self) -> subprocess.Popen:
        """Return a new process that has read the vocabulary."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # Settings of the allocator can reserve much memory at the start, which would not count.
        allocator = ("GLIBC_TUNABLES", "MALLOC_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(allocator)}
        process = subprocess.Popen([sys.executable, "-P", str(PROGRAM)], bufsize=0, env=environment, **pipes)
        if not _ask(process, self._settings):
            raise OSError(f"the process that checks grammars ended with status {_end(process)}.")
        return process


def _ask(process: subprocess.Popen, message: Any) -> bool:
    """Send a message as one line of JSON and wait for its answer; return False if the process has ended."""
    try:
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:  # a pipe without a buffer takes a part at a time
            left = left[process.stdin.write(left) :]
        return process.stdout.read(1) == b"."
    except BrokenPipeError:
        return False


def _end(process: subprocess.Popen) -> int:
    """End a process, and return its status."""
    process.kill()  # does nothing if it has ended, but is not yet waited for: its own status stays
    process.stdin.close()
    process.stdout.close()
    return process.wait()


def _end_all(idle: deque[subprocess.Popen]) -> None:
    while idle:
        _end(idle.pop())
