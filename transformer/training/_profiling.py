"""A trace of some steps, as XProf shows it: what runs on the device and what the host does meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import jax

from transformer.config._checks import ConfigError

FOLDER = "profile"
"""of a workdir, where traces lie"""


@dataclass(frozen=True)
class Window:
    """The steps to trace: those after `start` are done, until `stop` are."""

    start: int
    stop: int


def parse_window(text: str, steps: int) -> Window:
    """The window of "20:30" in a run of so many steps.

    Raises:
        ConfigError: not two whole numbers, the first below the second, both within the run.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None:
        raise ConfigError(
            f"--profile takes START:STOP, steps between which a trace is written, such as 20:30, got {text!r}."
        )
    window = Window(int(found[1]), int(found[2]))
    if not window.start < window.stop <= steps:
        raise ConfigError(
            f"--profile {text}: START must be below STOP, and STOP at most the {steps} steps of the run "
            f"(--training.steps). Try --profile {_within(steps)}."
        )
    return window


def _within(steps: int) -> str:
    start = min(20, steps // 2)
    return f"{start}:{min(start + 10, steps)}"


class Profiler:
    """Context manager that traces a window of a run into `workdir/profile`; without a window it does nothing.

    Of processes that train together each sees its own devices; the first writes a trace, the others none.
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
        """`step` is how many are done, `say` what tells the user."""
        self._folder, self._say, self._begun = Path(workdir) / FOLDER, say, None
        self._window = window if first else None
        if window is not None and step >= window.stop:
            say(f"no trace: the run goes on from step {step}, and --profile ends at step {window.stop}")
            self._window = None

    @property
    def running(self) -> bool:
        """Whether a trace is being taken."""
        return self._begun is not None

    def at(self, step: int, wait: Callable[[], None]) -> None:
        """To be called between steps, `step` are dispatched: begins or ends the trace; `wait` lets these be done."""
        if self._window is None:
            return
        if not self.running and self._window.start <= step < self._window.stop:
            wait()
            jax.profiler.start_trace(self._folder)
            self._begun = step
        elif self.running and step >= self._window.stop:
            wait()
            self._end(step)

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Marks what is inside as the step of this number, where a trace is being taken."""
        if not self.running:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends a trace whose run ended first."""
        if self.running:
            self._end(None)

    def _end(self, step: int | None) -> None:
        begun, self._begun, self._window = self._begun, None, None
        jax.profiler.stop_trace()
        until = "the end" if step is None else f"step {step}"
        folder = shlex.quote(str(self._folder))
        self._say(
            f"trace from step {begun} to {until}: {self._folder}\n"
            f"  to open it: pip install xprof; xprof --logdir {folder} --port 8791, then http://localhost:8791\n"
            f"  (with xprof installed TensorBoard shows it, too: tensorboard --logdir {folder})"
        )
