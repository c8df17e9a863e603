"""Evaluation on held-out data: what is evaluated, and the mean loss."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import PyTree

from transformer.config._progress import counting
from transformer.data._dataset import Batch, Dataset
from transformer.nn.models._base import first_bad_parameter
from transformer.training._settings import EvaluationConfig
from transformer.training.tasks._rewards import Rewards

EvalStep = Callable[..., Mapping[str, jax.Array]]
"""function of the parameters and a batch that returns `Task.sums`"""

_MEASURED = ("loss_sum", "weight", "correct", "absolute_error", "exact_answers", "answers")
"""sums that are not means over the targets in `EvalLoss.others`"""

SHARES = ("exact_match", "prefers_chosen", "reference_prefers_chosen", "image_to_text", "text_to_image")
"""measures that are shares of the held-out examples"""


class NonFiniteError(ArithmeticError):
    """A value was not finite and nan_policy is "stop". The state is that of the previous step."""


@dataclass(frozen=True)
class EvalLoss:
    """Mean loss and accuracy over held-out targets."""

    loss: float
    """cross-entropy in nats per target; for forecasts, the mean squared error"""
    targets: float
    """number of targets (sum of their weights)"""
    accuracy: float | None = None
    """fraction of targets with the highest logit; None for forecasts"""
    mae: float | None = None
    """mean absolute error of forecasts; None for other tasks"""
    others: dict[str, float] = field(default_factory=dict)
    """the task's other measures by name: means over targets, such as the rewards of preferences, and `exact_match`, the
    share of answers that greedy decoding writes exactly"""
    score: str | None = None
    """name of a score whose negative is `loss`; `accuracy` is then the share of exact matches"""

    @property
    def measures(self) -> dict[str, float]:
        """Return the available measures by name, without the number of targets."""
        values = {"loss": self.loss, "accuracy": self.accuracy, "mae": self.mae}
        if self.score is not None:
            values = {self.score: -self.loss, "exact_match": self.accuracy}
        return {name: value for name, value in values.items() if value is not None} | self.others

    def __str__(self):
        if self.mae is not None:
            return f"MSE {self.loss:.4f}, MAE {self.mae:.4f}"
        others = "".join(f", {_shown(name, value)}" for name, value in self.others.items())
        if self.score is not None:
            exact = "" if self.accuracy is None else f", exact match {100 * self.accuracy:.2f} %"
            return f"{self.score} {-self.loss:.4f}{exact}{others}"
        return f"loss {self.loss:.4f}, accuracy {100 * self.accuracy:.2f} %{others}"


def _shown(name: str, value: float) -> str:
    """Format a measure for the terminal, shares of examples in percent."""
    words = name.replace("_", " ")
    return f"{words} {100 * value:.2f} %" if name in SHARES else f"{words} {value:.4f}"


def evaluate_loss(
    eval_step: EvalStep,
    params: PyTree,
    batches: Iterable[Batch],
    should_stop: Callable[[], bool] = lambda: False,
    strict: bool = True,
    num_bytes: int | None = None,
) -> EvalLoss | None:
    """Compute the mean loss over all batches, weighted by the weights of the targets.

    None if `should_stop`, which is called before each batch, ended the evaluation. Unless `strict`, a non-finite loss
    is returned like any other; otherwise NonFiniteError has the index of the batch and the first non-finite parameter,
    if there is one. From `num_bytes`, the UTF-8 bytes of text that the targets stand for (`Dataset.target_bytes`),
    follows the measure bits_per_byte. ValueError if the batches contain no target.
    """
    # Add up sums and weights over all batches and divide once. A mean of the means of batches would give targets of
    # small batches (the last one) more weight. Python floats are float64.
    sums: dict[str, float] = defaultdict(float)
    add = counting("held-out batches")
    for number, batch in enumerate(batches):
        if should_stop():
            return None
        add(1)
        values = jax.device_get(eval_step(params, batch))
        if strict and not np.isfinite(values["loss_sum"]):
            bad = first_bad_parameter(params)
            cause = f"{bad} contains NaN or infinity" if bad else "all parameters are finite, so its logits are not"
            raise NonFiniteError(
                f"the loss of held-out batch {number} is {float(values['loss_sum']):g}: {cause}. Use an earlier "
                f"checkpoint, or compute in float32 (--model.dtype)."
            )
        for name, value in values.items():
            sums[name] += float(value)
    if not sums["weight"]:
        raise ValueError("nothing to evaluate: the held-out data contains no target. Hold out more data.")
    means = {name: value / sums["weight"] for name, value in sums.items()}
    others = {name: value for name, value in means.items() if name not in _MEASURED}
    if sums["answers"]:
        others["exact_match"] = sums["exact_answers"] / sums["answers"]
    if num_bytes:
        others["bits_per_byte"] = sums["loss_sum"] / (math.log(2) * num_bytes)
    return EvalLoss(means["loss_sum"], sums["weight"], means.get("correct"), means.get("absolute_error"), others)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model, and the held-out data to evaluate it on."""

    model: nn.Module
    params: PyTree
    """tree of its parameters, without the outer "params" """
    dataset: Dataset
    options: EvaluationConfig
    eval_step: EvalStep
    """computes the sums of a batch"""
    seed: int
    """random seed of sampled texts"""
    name: str = ""
    """name of the run, for titles"""
    rewards: Rewards | None = None
    """rewards of completions, for a task that has them"""
    strict: bool = True
    """whether a loss that is not finite is an error"""
    should_stop: Callable[[], bool] = lambda: False
    """called before each batch; True ends the evaluation"""

    @property
    def unseen(self) -> str:
        """Name of the split for the report: test, or else validation."""
        return "test" if "test" in self.dataset.splits else "validation"

    def mean_loss(self, split: str, limit: int | None = None, num_bytes: int | None = None) -> EvalLoss | None:
        """Compute `evaluate_loss` over at most `limit` batches of a split."""
        batches = self.dataset.eval_batches(split, limit)
        return evaluate_loss(self.eval_step, self.params, batches, self.should_stop, self.strict, num_bytes)
