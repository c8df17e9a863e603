"""SIGTERM and Ctrl-C: stop soon and in order, or at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""those that ask a run to stop"""


class StopSignal:
    """Context manager: the first SIGTERM or SIGINT sets `requested` and says so, the second leaves at once.

    Look at `requested` after every piece of work (compile, step, evaluation batch, save). Inside, no KeyboardInterrupt
    is raised. "At once" holds in the middle of a compilation too: Python's handlers wait until such a call returns, so
    a thread listens to the byte that the interpreter writes for a signal the moment it arrives. Outside the main
    thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.requested: bool = False  # a signal has come
        self.signum: int | None = None  # which one
        self._old: dict[int, Any] = {}

    @property
    def exit_code(self) -> int | None:
        """128 + signal: what the process should return after it has saved; None without a signal."""
        return None if self.signum is None else 128 + self.signum

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)  # what set_wakeup_fd asks for
            self._thread = threading.Thread(target=self._listen, name="stop-signal", daemon=True)
            self._thread.start()
            self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._old = {number: signal.signal(number, _ignore) for number in SIGNALS}
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._old:
            for number, handler in self._old.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._old_wakeup)
            os.write(self._write, b"\0")  # no signal: the end
            self._thread.join()
            os.close(self._read)
            os.close(self._write)
            self._old = {}

    def _listen(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if number not in SIGNALS:
                continue  # of somebody else's handler
            if self.requested:
                os._exit(128 + number)  # nothing is finished, nothing flushed: a checkpoint is renamed last of all
            self.signum, self.requested = number, True
            name = signal.Signals(number).name
            line = "\n" if os.isatty(2) else ""  # the terminal has just shown ^C
            _say(f"{line}{name}: will save and stop. Once more leaves at once; the checkpoints already written stay.\n")


def _ignore(number: int, frame: FrameType | None) -> None:
    """Python's own part of the handling: nothing, the listener has the byte already."""


def _say(text: str) -> None:
    try:
        os.write(2, text.encode())  # no lock of sys.stderr to wait for
    except OSError:
        return  # nobody reads it any more; stopping goes on
