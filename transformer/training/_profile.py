"""Profiling: write a trace of some training steps, with device and host activity, for XProf."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from transformer.config._checks import ConfigError

FOLDER = "profile"
"""directory of a workdir that holds the traces"""


@dataclass(frozen=True)
class Window:
    """The steps to trace: from the end of step `start` to the end of step `stop`."""

    start: int
    stop: int


def parse_window(text: str, steps: int) -> Window:
    """Parse a window such as "20:30" for a run of `steps` steps; ConfigError if it is no such window within the run."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None:
        raise ConfigError(
            f"--profile must be START:STOP, the steps between which to record a trace, such as 20:30, got {text!r}."
        )
    window = Window(int(found[1]), int(found[2]))
    if not window.start < window.stop <= steps:
        start = min(20, steps // 2)
        raise ConfigError(
            f"--profile {text}: START must be below STOP, and STOP must be at most {steps}, the number of steps of the "
            f"run (--training.steps). Try --profile {start}:{min(start + 10, steps)}."
        )
    return window


class Profiler(contextlib.AbstractContextManager):
    """Context manager that traces a window of a run into `workdir/profile`; without a window it does nothing.

    In multi-process training only the first process writes a trace, which shows its own devices.
    """

    def __init__(
        self,
        window: Window | None,
        workdir: str | os.PathLike,
        *,
        step: int,
        first: bool = True,
        say: Callable[[str], None] = print,
    ):
        """Prepare the profiler for a run that resumes at `step`; nothing is traced yet. `window` None: no trace."""
        self._folder, self._say, self._started = Path(workdir) / FOLDER, say, None
        self._window = window if first else None
        if window is not None and step >= window.stop:
            say(f"no trace: the run resumes from step {step}, but --profile ends at step {window.stop}")
            self._window = None

    @property
    def running(self) -> bool:
        """Whether a trace is being recorded."""
        return self._started is not None

    def at(self, step: int, wait: Callable[[], None]) -> None:
        """Start or end the trace if it is time to. `wait` waits for the dispatched steps, so that it has whole steps
        only.
        """
        if self._window is None:
            return
        if not self.running and self._window.start <= step < self._window.stop:
            wait()
            jax.profiler.start_trace(self._folder)
            self._started = step
        elif self.running and step >= self._window.stop:
            wait()
            self._end(step)

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Return a context manager that marks its body as the step of this number in the trace."""
        if not self.running:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def __exit__(self, *_: object) -> None:
        """End the trace if the run ends before the window."""
        if self.running:
            self._end(None)

    def _end(self, step: int | None) -> None:
        started, self._started, self._window = self._started, None, None
        jax.profiler.stop_trace()
        until = "the end" if step is None else f"step {step}"
        folder = shlex.quote(str(self._folder))
        self._say(
            f"trace from step {started} to {until}: {self._folder}\n"
            f"  to open it: pip install xprof; xprof --logdir {folder} --port 8791, then http://localhost:8791\n"
            f"  (with xprof installed, TensorBoard shows it too: tensorboard --logdir {folder})"
        )
