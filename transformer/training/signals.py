"""SIGTERM and Ctrl-C: stop soon and in order, or at once."""

from __future__ import annotations


class StopSignal:
    """Context manager: the first SIGTERM or SIGINT sets `requested` and says so, the second leaves at once.

    Look at `requested` after every piece of work (compile, step, evaluation batch, save). No KeyboardInterrupt is raised
    inside. Outside the main thread, where Python allows no handlers, it does nothing.
    """

    requested: bool  # a signal has come
    signum: int | None  # which one
    exit_code: int | None  # 128 + signum: what the process should return after it has saved
