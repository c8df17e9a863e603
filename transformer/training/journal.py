"""What the loop knows beside the state: sums since the last line of metrics, totals, the best evaluation so far."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from transformer.training.metrics import MetricsWriter, Progress
from transformer.training.recipe import Recipe
from transformer.training.step import check_finite


@dataclass
class Ledger:
    """Numbers that go into every checkpoint, so that a run gone on with writes the same lines as one never stopped.

    Since the last line: `loss_sum` and its `weight` (nats, targets), `router_loss` of routed layers (a sum, nats),
    `grad_norm` (a sum), `batches`, the `places` for tokens in them and how many hold `padding`. In all: `skipped`
    batches, target `tokens`, `train_seconds` and all `seconds`. Of the last evaluation `eval_loss` and `eval_accuracy`
    or `eval_mae`; `best_loss` (nats a target) and `best_step` of the best.
    """

    loss_sum: float = 0.0
    """since the last line; so the next six"""
    weight: float = 0.0
    router_loss: float = 0.0
    grad_norm: float = 0.0
    batches: int = 0
    padding: int = 0
    places: int = 0
    skipped: int = 0
    """in all; so all that follow"""
    tokens: float = 0.0
    train_seconds: float = 0.0
    seconds: float = 0.0
    evaluated: int = 0
    """step of the last evaluation"""
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    eval_mae: float | None = None
    eval_metric: float | None = None
    """what the best is judged by, the lower the better: the loss, or of classes the share of errors"""
    best_loss: float | None = None
    best_metric: float | None = None
    """the lowest of these"""
    best_step: int | None = None

    def record_evaluation(
        self,
        step: int,
        loss: float,
        accuracy: float | None = None,
        mae: float | None = None,
        by_accuracy: bool = False,
    ) -> None:
        """Notes a loss (nats a target, or squared) with an accuracy or a mean absolute error, and whether the loss, or
        with `by_accuracy` the accuracy, is the best (of equal ones the newer, as checkpoints are).
        """
        self.evaluated, self.eval_loss, self.eval_accuracy, self.eval_mae = step, loss, accuracy, mae
        self.eval_metric = 1.0 - accuracy if by_accuracy else loss
        if not math.isfinite(loss):
            self.eval_metric = None
            return
        best = self.best_metric if by_accuracy else self.best_loss
        if best is None or self.eval_metric <= best:
            self.best_metric, self.best_step = self.eval_metric, step
        if self.best_loss is None or loss <= self.best_loss:
            self.best_loss = loss

    @property
    def tokens_per_s(self) -> float:
        """Target tokens a second while training, over all calls."""
        return self.tokens / self.train_seconds if self.train_seconds else 0.0


class Journal:
    """Turns metrics of steps into lines: reads those of a step only after the next one was dispatched."""

    def __init__(self, recipe: Recipe, ledger: Ledger, writer: MetricsWriter, progress: Progress, paths: list[str]):
        self._recipe, self._ledger, self._writer, self._progress = recipe, ledger, writer, progress
        self._paths = paths
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._clock: float | None = None
        self._tokens, self._steps = 0.0, 0  # since the clock was started

    def add(self, step: int, metrics: dict[str, jax.Array], places: tuple[int, int] | None = None) -> None:
        """Takes the metrics of a step just dispatched, and reads those of the step before.

        `places` of its batch: how many hold padding, and how many there are; None where none can.

        Raises:
            NonFiniteError: those of the step before were not finite, and the recipe says to stop.
        """
        self.read()
        if places is not None:
            self._ledger.padding += places[0]
            self._ledger.places += places[1]
        self._pending = (step, metrics)

    def read(self) -> None:
        """Reads what is pending (waiting for the device), and writes a line where one is due."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = jax.device_get(metrics)
        if self._recipe.training.nan_policy == "stop":
            check_finite(step, values, self._paths)
        ledger, weight = self._ledger, 0.0
        if values["finite"]:
            weight = float(values["weight"])
            ledger.loss_sum += float(values["loss_sum"])
            ledger.weight += weight
            ledger.router_loss += float(values.get("router_loss", 0.0))
            ledger.grad_norm += float(values["grad_norm"])
            ledger.batches += 1
        ledger.skipped = int(values["skipped"])
        if self._clock is None:
            self._clock = time.perf_counter()  # the first step after a pause is not timed: it may have been compiled
        else:
            self._tokens, self._steps = self._tokens + weight, self._steps + 1
        if step % self._recipe.logging.every == 0 or step == self._recipe.training.steps:
            self._line(step, values)
        self._progress.advance(step)

    def pause(self) -> None:
        """Reads what is pending and stops the clock: what follows (an evaluation, a checkpoint) is not training."""
        self.read()
        self._measure()
        self._clock = None

    def _measure(self) -> dict[str, float]:
        """Speed since the clock was started, which starts again."""
        if self._clock is None or not self._steps:
            return {}
        now = time.perf_counter()
        seconds, tokens, steps = now - self._clock, self._tokens, self._steps
        self._clock, self._tokens, self._steps = now, 0.0, 0
        self._ledger.tokens += tokens
        self._ledger.train_seconds += seconds
        return {"perf/tokens_per_s": tokens / seconds, "perf/step_time_s": seconds / steps}

    def _line(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        ledger, speed, line = self._ledger, self._measure(), {}
        loss = None
        if ledger.batches:
            loss = ledger.loss_sum / max(ledger.weight, 1e-9)
            line = {"train/loss": loss, "train/grad_norm": ledger.grad_norm / ledger.batches}
            if "router_loss" in values:
                line["train/router_loss"] = ledger.router_loss / max(ledger.weight, 1e-9)
        line["train/learning_rate"] = float(values["learning_rate"])
        if self._recipe.training.nan_policy == "skip":
            line["train/skipped"] = ledger.skipped
        if ledger.places:
            line["data/padding"] = ledger.padding / ledger.places
        self._writer.write(step, line | speed)
        self._progress.update(step, loss=loss, tokens_per_s=speed.get("perf/tokens_per_s"))
        ledger.loss_sum = ledger.weight = ledger.router_loss = ledger.grad_norm = 0.0
        ledger.batches = ledger.padding = ledger.places = 0
