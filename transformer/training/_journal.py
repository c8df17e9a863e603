"""What the loop knows beside the state: sums since the last line of metrics, totals, the best evaluation so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from transformer.training._losses import Batch
from transformer.training._memory import peak_bytes
from transformer.training._metrics import MetricsWriter, Progress
from transformer.training._recipe import Recipe
from transformer.training._speed import Speed
from transformer.training._step import NonFiniteError, check_finite

MOST_IN_A_ROW = 100
"""batches one after the other that may be passed over as not finite: with more it is not the batches"""
_RECENT = 50  # steps that the usual loss is a mean of, as an exponential average
_FEWEST = 20  # losses before one can be called unusual
_TAKEN = 4.0  # deviations over the usual loss that a spike counts as


class LossSpikeError(ArithmeticError):
    """A loss was far above what was usual, and the recipe says to stop."""


@dataclass
class TrainStats:
    """Numbers that go into every checkpoint, so that a run gone on with writes the same lines as one never stopped.

    Since the last line: `loss_sum` and its `weight` (nats, targets), `router_loss` of routed layers (a sum, nats),
    `grad_norm` (a sum), `batches`, the `places` for tokens in them and how many hold `padding`. In all: `skipped`
    batches, target `tokens`, `train_seconds` and all `seconds`. Of the last evaluation `eval_loss` and `eval_accuracy`
    or `eval_mae`; `best_loss` (nats a target) and `best_step` of the best. `losses` have made the `usual_loss` and its
    `variance`; batches above a `limit` are `spikes`.
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
    losses: int = 0
    usual_loss: float = 0.0
    """mean of recent batches, nats a target"""
    variance: float = 0.0
    """of these losses"""
    limit: float | None = None
    """loss above which a batch is a spike, by all batches that were read; None: too few were"""
    limit_before: float | None = None
    """the same without the last of them: what a step goes by that is dispatched before the last one is read"""
    spikes: int = 0
    """in all"""
    bad_in_a_row: int = 0
    """batches that were not finite, since the last that was"""

    def watch(self, loss: float, limit: float | None, deviations: float) -> bool:
        """Takes in the loss (nats a target) of a batch; whether it is a spike, above the `limit` that it was under.

        The next limit is so many standard deviations over the mean of recent losses (Finch 2009, Incremental
        calculation of weighted mean and variance, section 9). A spike counts as a loss four deviations over it: one
        alone changes little, and a loss that stays high becomes the usual one after some tens.
        """
        spike = limit is not None and bool(np.float32(loss) > np.float32(limit))
        self.spikes += spike
        self.losses += 1
        share = max(1.0 / self.losses, 1.0 / _RECENT)
        taken = min(limit, self.usual_loss + _TAKEN * math.sqrt(self.variance)) if spike else loss
        distance = taken - self.usual_loss
        self.usual_loss += share * distance
        self.variance = (1.0 - share) * (self.variance + share * distance**2)
        self.limit_before = self.limit
        if self.losses >= _FEWEST:
            self.limit = self.usual_loss + deviations * math.sqrt(self.variance)
        return spike

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

    def __init__(
        self,
        recipe: Recipe,
        ledger: TrainStats,
        writer: MetricsWriter,
        progress: Progress,
        paths: list[str],
        speed: Speed | None = None,
    ):
        """`paths` are the `parameter_paths`; `speed` counts FLOPs."""
        self._recipe, self._ledger, self._writer, self._progress = recipe, ledger, writer, progress
        self._paths, self._speed = paths, speed
        self._pending: tuple[int, dict[str, jax.Array], float | None, Any, Callable[[Any], str]] | None = None
        self._clock: float | None = None
        self._tokens, self._steps, self._waited, self._flops = 0.0, 0, 0.0, 0  # since the clock was started
        self._compiling = 0.0  # seconds since the last line

    def fed(self, seconds: float) -> None:
        """Takes how long the batch of the next step took. If the step before is done by now, the device waited for it,
        at most so long.
        """
        if self._pending is not None and all(leaf.is_ready() for leaf in jax.tree.leaves(self._pending[1])):
            self._waited += seconds

    def compiled(self, seconds: float) -> None:
        """Takes how long the compilation of a step took: it is not training."""
        self._compiling += seconds
        if self._clock is not None:
            self._clock += seconds

    def skip_above(self) -> np.float32 | None:
        """The mean loss (nats a target) above which the next step is to change nothing; None: the recipe never skips a
        spike.
        """
        if self._recipe.training.spike_policy != "skip":
            return None
        limit = self._limit()
        return np.float32(np.inf if limit is None else limit)

    def _limit(self) -> float | None:
        """By the batches up to the one before last, whether that one is read by now or not: a run gone on with is to
        decide as one that never stopped.
        """
        return self._ledger.limit_before if self._pending is None else self._ledger.limit

    def add(
        self,
        step: int,
        metrics: dict[str, jax.Array],
        places: tuple[int, int] | None = None,
        batch: Batch | None = None,
        why: Callable[[Batch], str] = lambda batch: "",
    ) -> None:
        """Takes the metrics of a step just dispatched, and reads those of the step before.

        `places` of its `batch`: how many hold padding, and how many there are; None where none can. `why` names what
        was not finite in the batch or in the state after it; it is called only if the step was not finite.

        Raises:
            NonFiniteError, LossSpikeError: of the step before, where the recipe says to stop.
        """
        limit = self._limit()
        self.read()
        if places is not None:
            self._ledger.padding += places[0]
            self._ledger.places += places[1]
        self._pending = (step, metrics, limit, batch, why)

    def read(self) -> None:
        """Reads what is pending (waiting for the device), and writes a line where one is due."""
        if self._pending is None:
            return
        (step, metrics, limit, batch, why), self._pending = self._pending, None
        values = jax.device_get(metrics)
        ledger, weight = self._ledger, 0.0
        if self._judged(step, values, limit, batch, why):
            weight = float(values["weight"])
            ledger.loss_sum += float(values["loss_sum"])
            ledger.weight += weight
            ledger.router_loss += float(values.get("router_loss", 0.0))
            ledger.grad_norm += float(values["grad_norm"])
            ledger.batches += 1
        ledger.skipped = int(values["skipped"])
        if self._clock is None:
            self._clock = time.perf_counter()  # the first step after a pause is not timed: it may have been compiled
            self._waited = 0.0
        else:
            self._tokens, self._steps = self._tokens + weight, self._steps + 1
            if self._speed is not None:
                self._flops += self._speed.flops(batch)
        if step % self._recipe.logging.every == 0 or step == self._recipe.training.steps:
            self._line(step, values)
        self._progress.advance(step)

    def _judged(
        self,
        step: int,
        values: Mapping[str, np.ndarray],
        limit: float | None,
        batch: Any,
        why: Callable[[Any], str],
    ) -> bool:
        """Whether the step has changed anything. Raises NonFiniteError and LossSpikeError as `add`."""
        training, ledger = self._recipe.training, self._ledger
        if not values["finite"]:
            ledger.bad_in_a_row += 1
            ledger.limit_before = ledger.limit  # of the batches before this one, which says nothing about losses
            if training.nan_policy == "stop":
                check_finite(step, values, self._paths, why(batch))
            if ledger.bad_in_a_row >= MOST_IN_A_ROW:
                raise NonFiniteError(
                    f"step {step}: the last {MOST_IN_A_ROW} batches were not finite, one after the other, and none has "
                    f"changed anything (--training.nan-policy skip). {why(batch)} It is not the batches: start "
                    f"anew with a lower --optimizer.learning-rate or a longer --optimizer.warmup-steps."
                )
            return False
        ledger.bad_in_a_row = 0
        loss = float(np.float32(values["loss_sum"]) / max(np.float32(values["weight"]), np.float32(1e-9)))
        if not ledger.watch(loss, limit, training.spike_deviations):
            return True
        if training.spike_policy == "stop":
            raise LossSpikeError(
                f"step {step}: the loss is {loss:.4f}, a spike: it is above {limit:.4f}, which is "
                f"{training.spike_deviations:g} standard deviations (--training.spike-deviations) over the usual one. "
                f"The newest checkpoint is of before it; to go on from there, --training.spike-policy skip passes over "
                f"such batches, and log trains on them."
            )
        skip = training.spike_policy == "skip"
        self._progress.print(
            f"step {step}: a spike, the loss is {loss:.4f} where up to {limit:.4f} is usual"
            + (": passed over" if skip else "")
        )
        return not skip

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
        seconds, tokens, steps, waited = now - self._clock, self._tokens, self._steps, self._waited
        self._clock, self._tokens, self._steps, self._waited = now, 0.0, 0, 0.0
        flops, self._flops = self._flops, 0
        self._ledger.tokens += tokens
        self._ledger.train_seconds += seconds
        return {
            "perf/tokens_per_s": tokens / seconds,
            "perf/step_time_s": seconds / steps,
            "perf/data_wait": waited / seconds,
            **({} if self._speed is None else self._speed.measures(flops, seconds)),
        }

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
        if ledger.spikes:
            line["train/spikes"] = ledger.spikes
        if ledger.places:
            line["data/padding"] = ledger.padding / ledger.places
        line["perf/peak_memory_bytes"] = peak_bytes()
        if self._compiling:
            line["perf/compile_s"], self._compiling = self._compiling, 0.0
        self._writer.write(step, line | speed)
        self._progress.update(step, loss=loss, targets_per_s=speed.get("perf/tokens_per_s"), mfu=speed.get("perf/mfu"))
        ledger.loss_sum = ledger.weight = ledger.router_loss = ledger.grad_norm = 0.0
        ledger.batches = ledger.padding = ledger.places = 0
