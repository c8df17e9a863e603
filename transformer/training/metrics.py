"""Metrics into a file, into TensorBoard and onto the screen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TextIO

from transformer.viz.records import read_metrics

__all__ = ["NAMES", "MetricsWriter", "Progress", "read_metrics"]

# name -> unit: the names that other tools may rely on. "eval/exact_match/<group>" is the same for one group.
NAMES = {
    "train/loss": "nats per token",
    "train/grad_norm": "",
    "train/learning_rate": "",
    "eval/loss": "nats per token",
    "eval/exact_match": "fraction",
    "perf/tokens_per_s": "tokens per second",
    "perf/step_time_s": "seconds",
}


class MetricsWriter:
    """Appends to `workdir/metrics.jsonl`, one strict-JSON object a line: {"step": 10, "train/loss": 2.5, ...}.

    Write every line of step n (and `flush`) before saving the checkpoint of step n: lines after `restored_step` are
    dropped at the start, lines up to it are kept.
    """

    def __init__(self, workdir: str | os.PathLike, *, restored_step: int = 0, tensorboard: bool = False): ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line; values are Python, NumPy or JAX scalars (a JAX one is waited for). A NaN is written as "NaN"."""

    def flush(self) -> None:
        """Everything written is on the disk."""

    def close(self) -> None: ...


class Progress:
    """A bar with step, loss, tokens/s and time left on a terminal; a plain line per `update` elsewhere.

    mode "auto" looks at the stream, "bar" and "lines" insist, "none" is silent (except `print`).
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        mode: Literal["auto", "bar", "lines", "none"] = "auto",
        stream: TextIO | None = None,
    ): ...

    def update(self, step: int, *, loss: float | None = None, tokens_per_s: float | None = None) -> None:
        """To be called when metrics are logged (not every step): moves the bar, or writes a line."""

    def advance(self, step: int) -> None:
        """Moves the bar without new figures (cheap; writes nothing into a pipe)."""

    def print(self, text: str) -> None:
        """Text of its own (samples, an evaluation), above the bar."""

    def close(self) -> None: ...
