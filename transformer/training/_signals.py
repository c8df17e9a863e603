"""Handle SIGTERM and Ctrl-C: the first one stops the run cleanly, the second one immediately."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""signals that request a run to stop"""


class StopSignal:
    """Context manager: the first SIGTERM or SIGINT sets `requested` and prints a line, the second ends the process.

    Check `requested` after every piece of work (compilation, step, evaluation batch, save). No KeyboardInterrupt is
    raised inside the context. The second signal ends the process even during a compilation. A Python signal handler
    would run only after the compilation returns, so a thread reads the byte that the interpreter writes as soon as a
    signal arrives. Outside the main thread, where Python allows no signal handlers, the context manager does nothing.
    """

    def __init__(self) -> None:
        self.requested: bool = False  # whether a signal was received
        self.signum: int | None = None  # its number
        self._old: dict[int, Any] = {}

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process after it has saved, 128 + signal; None without a signal."""
        return None if self.signum is None else 128 + self.signum

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)  # required by set_wakeup_fd
            self._thread = threading.Thread(target=self._listen, name="stop-signal", daemon=True)
            self._thread.start()
            self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._old = {number: signal.signal(number, _ignore) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if self._old:
            for number, handler in self._old.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._old_wakeup)
            os.write(self._write, b"\0")  # not a signal number; ends the thread
            self._thread.join()
            os.close(self._read)
            os.close(self._write)
            self._old = {}

    def _listen(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if number not in SIGNALS:
                continue  # a signal with another handler
            if self.requested:
                # Without any cleanup. This is safe for checkpoints: renaming one to its final name is the last step.
                os._exit(128 + number)
            self.signum, self.requested = number, True
            name = signal.Signals(number).name
            line = "\n" if os.isatty(2) else ""  # the terminal has just printed ^C
            _say(
                f"{line}{name}: will save and stop. Send it again to exit immediately and keep the saved checkpoints.\n"
            )


def _ignore(number: int, frame: FrameType | None) -> None:
    """Python-level signal handler that does nothing, because the thread handles the signal."""


def _say(text: str) -> None:
    try:
        os.write(2, text.encode())  # not sys.stderr, whose lock the main thread may hold
    except OSError:
        return  # stderr is closed; stop without the message
