"""Training statistics and metrics logging: sums since the last line, totals, loss spikes, and the best evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from transformer.training._flops import Speed
from transformer.training._memory import peak_bytes
from transformer.training._recipe import Recipe
from transformer.training._step import check_finite
from transformer.training.metrics._writer import MetricsWriter, Progress
from transformer.training.tasks._evaluation import EvalLoss, NonFiniteError
from transformer.training.tasks._losses import Batch
from transformer.training.tasks._table import TASKS

MOST_IN_A_ROW = 100
"""limit for consecutive non-finite batches that nan_policy "skip" skips; more of them are not caused by the data"""
_RECENT = 50  # time constant, in steps, of the exponential moving average of the loss
_FEWEST = 20  # minimum number of losses before a spike can be detected
_TAKEN = 4.0  # a spike enters the mean as a loss this many standard deviations above it


class LossSpikeError(ArithmeticError):
    """The loss was far above the recent mean, and the recipe has spike_policy "stop"."""


@dataclass
class TrainStats:
    """Statistics saved in every checkpoint, so that a resumed run logs the same metrics as an uninterrupted one.

    Since the last metrics line: `loss_sum` and its `weight` (nats, targets), `router_loss` of MoE layers (a sum, nats),
    `grad_norm` (a sum), the number of `batches`, the number of token positions in them (`places`), and of padding
    positions (`padding`). Totals: `skipped` batches, target `tokens`, `train_seconds` and `seconds` of the whole run.
    Last evaluation: `eval_loss`, and `eval_accuracy` or `eval_mae`. Best evaluation: `best_loss` (nats per target) and
    `best_step`. Spike detection: `usual_loss` and `variance` are the running mean and variance of `losses` losses, and
    batches with a loss above `limit` count as `spikes`.
    """

    loss_sum: float = 0.0
    weight: float = 0.0
    router_loss: float = 0.0
    grad_norm: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)
    """other sums of the task (`Task.means`), also since the last metrics line"""
    batches: int = 0
    padding: int = 0
    places: int = 0
    skipped: int = 0
    """total of the run, like all following fields"""
    tokens: float = 0.0
    train_seconds: float = 0.0
    seconds: float = 0.0
    evaluated: int = 0
    """step of the last evaluation"""
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    eval_mae: float | None = None
    eval_metric: float | None = None
    """value that decides which evaluation is the best, lower is better: the loss, or the error rate of a classifier"""
    best_loss: float | None = None
    best_metric: float | None = None
    """lowest `eval_metric` so far"""
    best_step: int | None = None
    losses: int = 0
    usual_loss: float = 0.0
    variance: float = 0.0
    limit: float | None = None
    """a loss above this limit is a spike; computed from all batches read so far; None if there are too few"""
    limit_before: float | None = None
    """`limit` before the last batch was read; used by the next step, which is dispatched before that batch is read"""
    spikes: int = 0
    bad_in_a_row: int = 0
    """number of consecutive non-finite batches up to now"""

    def watch(self, loss: float, limit: float | None, deviations: float) -> bool:
        """Add the mean loss of a batch to the running mean and variance, and return whether it is a spike.

        The next limit is the exponentially weighted mean of the losses plus `deviations` standard deviations (Finch
        2009, "Incremental calculation of weighted mean and variance", section 9). `limit` is the one that was in force
        when the step was dispatched. A spike enters the mean as a loss four standard deviations above it. So a single
        spike changes the mean only slightly, and a loss that stays high becomes the new mean after some tens of steps.
        """
        # Compare in float32, as the compiled step does (`make_train_step`): host and device must decide alike.
        spike = limit is not None and bool(np.float32(loss) > np.float32(limit))
        self.spikes += spike
        self.losses += 1
        # Finch's alpha. With 1/n for the first losses, mean and variance start as those of all losses so far.
        share = max(1.0 / self.losses, 1.0 / _RECENT)
        taken = min(limit, self.usual_loss + _TAKEN * math.sqrt(self.variance)) if spike else loss
        distance = taken - self.usual_loss  # x_n - mu_{n-1}
        self.usual_loss += share * distance  # mu_n = mu_{n-1} + alpha (x_n - mu_{n-1})
        # sigma_n^2 = (1 - alpha) (sigma_{n-1}^2 + alpha (x_n - mu_{n-1})^2)
        self.variance = (1.0 - share) * (self.variance + share * distance**2)
        self.limit_before = self.limit
        if self.losses >= _FEWEST:
            self.limit = self.usual_loss + deviations * math.sqrt(self.variance)
        return spike

    def record_evaluation(self, step: int, result: EvalLoss, metric: float) -> None:
        """Record an evaluation, and update the best one by its `Task.metric`. Of equal results, the newer one wins."""
        loss = result.loss
        self.evaluated, self.eval_loss, self.eval_accuracy, self.eval_mae = step, loss, result.accuracy, result.mae
        self.eval_metric = metric if math.isfinite(loss) else None
        if self.eval_metric is None:
            return
        if self.best_metric is None or metric <= self.best_metric:
            self.best_metric, self.best_step = metric, step
        if self.best_loss is None or loss <= self.best_loss:
            self.best_loss = loss

    @property
    def tokens_per_s(self) -> float:
        """Return the training throughput over all calls, in target tokens per second."""
        return self.tokens / self.train_seconds if self.train_seconds else 0.0


class Journal:
    """Writer of metrics lines. It reads the metrics of a step only after the next step was dispatched."""

    def __init__(
        self,
        recipe: Recipe,
        ledger: TrainStats,
        writer: MetricsWriter,
        progress: Progress,
        paths: list[str],
        speed: Speed | None = None,
    ):
        """Create a journal. `paths` is the result of `parameter_paths`; `speed` counts FLOPs."""
        self._recipe, self._ledger, self._writer, self._progress = recipe, ledger, writer, progress
        self._paths, self._speed = paths, speed
        self._pending: tuple[int, dict[str, jax.Array], float | None, Any, Callable[[Any], str]] | None = None
        self._clock: float | None = None
        self._tokens, self._steps, self._waited, self._flops = 0.0, 0, 0.0, 0  # since the clock started
        self._compiling = 0.0  # seconds of compilation since the last line
        self._rolling, self._rollouts = 0.0, 0  # seconds of rollouts since the last line, and their number
        self._means = TASKS[recipe.task].means(recipe)

    def fed(self, seconds: float) -> None:
        """Record the seconds that the batch of the next step took: the device waited if the last step has finished."""
        if self._pending is not None and all(leaf.is_ready() for leaf in jax.tree.leaves(self._pending[1])):
            self._waited += seconds

    def rolled(self, seconds: float) -> None:
        """Record how many seconds the completions for the next step took. They count as training time."""
        self._rolling, self._rollouts = self._rolling + seconds, self._rollouts + 1

    def compiled(self, seconds: float) -> None:
        """Record how many seconds the compilation of a step took. They do not count as training time."""
        self._compiling += seconds
        self._progress.exclude(seconds)
        if self._clock is not None:
            self._clock += seconds  # a later start excludes this time from the elapsed time

    def skip_above(self) -> np.float32 | None:
        """Return the mean loss above which to skip the next step: infinity without a limit yet; None: never skip."""
        if self._recipe.training.spike_policy != "skip":
            return None
        limit = self._limit()
        return np.float32(np.inf if limit is None else limit)

    def _limit(self) -> float | None:
        """Return the limit computed from all batches but the last one, whether the last one is already read or not.

        A checkpoint forces it to be read, but a resumed and an uninterrupted run must make the same decisions.
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
        """Store the metrics of a step that was just dispatched, and read those of the previous step.

        `places` are the numbers of padding positions and of all positions in the batch; None if it cannot have padding.
        `why` explains what is not finite in the batch or in the state after it; it is called only after a non-finite
        step. Raises NonFiniteError or LossSpikeError for the previous step if the policy in the recipe is "stop".
        """
        limit = self._limit()
        self.read()
        if places is not None:
            self._ledger.padding += places[0]
            self._ledger.places += places[1]
        self._pending = (step, metrics, limit, batch, why)

    def read(self) -> None:
        """Read the pending metrics (waits for the device), and write a line if one is due."""
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
            for name in {name for pair in self._means.items() for name in (pair[0], pair[1][1])}:
                ledger.measures[name] = ledger.measures.get(name, 0.0) + float(values[name])
            ledger.batches += 1
        ledger.skipped = int(values["skipped"])
        if self._clock is None:
            self._clock = time.perf_counter()  # the first step after a pause may include compilation
            self._waited = 0.0
        else:
            self._tokens, self._steps = self._tokens + weight, self._steps + 1
            if self._speed is not None:
                self._flops += self._speed.flops(batch)
        if step % self._recipe.logging.every == 0 or step == self._recipe.training.steps:
            self._line(step, values)
        self._progress.advance(step)

    def _judged(
        self, step: int, values: Mapping[str, np.ndarray], limit: float | None, batch: Any, why: Callable[[Any], str]
    ) -> bool:
        """Return whether the step was applied, not skipped. Raises NonFiniteError and LossSpikeError like `add`."""
        training, ledger = self._recipe.training, self._ledger
        if not values["finite"]:
            ledger.bad_in_a_row += 1
            ledger.limit_before = ledger.limit  # a non-finite loss does not change the limit
            if training.nan_policy == "stop":
                check_finite(step, values, self._paths, why(batch))
            if ledger.bad_in_a_row >= MOST_IN_A_ROW:
                raise NonFiniteError(
                    f"step {step}: the last {MOST_IN_A_ROW} batches in a row were not finite and were skipped "
                    f"(--training.nan-policy skip). {why(batch)} The data is not the cause. Start a new run with a "
                    f"lower --optimizer.learning-rate or a longer --optimizer.warmup-steps."
                )
            return False
        ledger.bad_in_a_row = 0
        loss = float(np.float32(values["loss_sum"]) / max(np.float32(values["weight"]), np.float32(1e-9)))
        if not ledger.watch(loss, limit, training.spike_deviations):
            return True
        if training.spike_policy == "stop":
            raise LossSpikeError(
                f"step {step}: loss spike: the loss is {loss:.4f}, above the limit of {limit:.4f}, which is "
                f"{training.spike_deviations:g} standard deviations (--training.spike-deviations) above the recent "
                f"mean. To resume from the newest checkpoint, from before the spike, pass --training.spike-policy skip "
                f"to skip such batches, or log to train on them."
            )
        skip = training.spike_policy == "skip"
        self._progress.print(
            f"step {step}: loss spike: the loss is {loss:.4f}, above the limit of {limit:.4f}"
            + (" (skipped)" if skip else "")
        )
        return not skip

    def pause(self) -> None:
        """Read the pending metrics and stop the clock, because an evaluation or a checkpoint is not training time."""
        self.read()
        self._measure()
        self._clock = None

    def _measure(self) -> dict[str, float]:
        """Return the speed since the clock started, and restart the clock."""
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
            for name, (called, per) in self._means.items():
                line[f"train/{called}"] = ledger.measures[name] / max(ledger.measures[per], 1e-9)
        line["train/learning_rate"] = float(values["learning_rate"])
        if self._recipe.training.nan_policy == "skip":
            line["train/skipped"] = ledger.skipped
        if ledger.spikes:
            line["train/spikes"] = ledger.spikes
        if ledger.places:
            line["data/padding"] = ledger.padding / ledger.places
        line["perf/peak_memory_bytes"] = peak_bytes()
        if self._rollouts:
            line["perf/rollout_s"] = self._rolling / self._rollouts
            self._rolling, self._rollouts = 0.0, 0
        if self._compiling:
            line["perf/compile_s"], self._compiling = self._compiling, 0.0
        self._writer.write(step, line | speed)
        self._progress.update(step, loss=loss, targets_per_s=speed.get("perf/tokens_per_s"), mfu=speed.get("perf/mfu"))
        ledger.loss_sum = ledger.weight = ledger.router_loss = ledger.grad_norm = 0.0
        ledger.batches = ledger.padding = ledger.places = 0
        ledger.measures = {}
