"""Evaluation on held-out data: mean loss, and sampled texts."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer.config._progress import counting
from transformer.data._dataset import Batch
from transformer.data._tokenizer import Tokenizer
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.nn.models._base import first_bad_parameter
from transformer.training._recipe import Recipe, build_model
from transformer.training._step import EvalStep, Metrics, NonFiniteError, evaluation_sums
from transformer.training.tasks._table import TASKS

_MEASURED = ("loss_sum", "weight", "correct", "absolute_error", "exact_answers", "answers")
"""sums that are not means over the targets in `EvalLoss.others`"""

SHARES = ("exact_match", "prefers_chosen", "reference_prefers_chosen", "image_to_text", "text_to_image")
"""measures that are shares of the held-out examples"""


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
    """name of a score whose negative is `loss`, `Task.score`; `accuracy` is then the share of exact matches"""

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


def compiled_eval_step(recipe: Recipe, reference: Any = None) -> EvalStep:
    """Return a jitted `make_eval_step`, compiled once per process for each task, model and batch shape.

    `reference` is the tree of the reference model's parameters, for a task that needs them.
    """
    options = TASKS[recipe.task].options(recipe)
    return functools.partial(_eval_step, recipe.task, build_model(recipe), reference=reference, options=options)


@functools.partial(jax.jit, static_argnames=("task", "model", "options"))
def _eval_step(task: str, model: nn.Module, params: Any, batch: Batch, reference: Any, options: Any) -> Metrics:
    return dict(evaluation_sums(task, model, params, batch, reference, options))


def evaluate_loss(
    eval_step: EvalStep,
    params: Any,
    batches: Iterable[Batch],
    should_stop: Callable[[], bool] = lambda: False,
    strict: bool = True,
    num_bytes: int | None = None,
) -> EvalLoss | None:
    """Compute the mean loss over all batches, weighted by the weights of the targets.

    Args:
        eval_step: returns the sums of one batch.
        params: parameters of the model.
        batches: held-out batches.
        should_stop: called before each batch; True ends the evaluation.
        strict: raise an error if a loss is not finite. Otherwise, a non-finite loss is returned like any other.
        num_bytes: UTF-8 bytes of text that the targets stand for (`Dataset.target_bytes`), for the measure
            bits_per_byte; None: not known.

    Returns:
        The means; None if `should_stop` ended the evaluation.

    Raises:
        ValueError: the batches contain no target.
        NonFiniteError: the loss of a batch is not finite. The message has the index of the batch and the first
            non-finite parameter, if there is one.
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


def write_texts(
    model: nn.Module,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    context: int,
    new_tokens: int,
    temperature: float,
    seed: int,
) -> list[str]:
    """Generate continuations of prompts by sampling.

    A model that was trained on windows of `context` tokens has not learned later positions. So the text is generated in
    pieces of half a window, each with the preceding half window as its prompt.

    Args:
        model: a decoder-only model.
        params: parameters of the model.
        tokenizer: tokenizer of the model.
        prompts: texts to continue.
        context: window length in training, in tokens.
        new_tokens: number of tokens to generate per prompt.
        temperature: sampling temperature; 0 is greedy.
        seed: random seed.

    Returns:
        Each prompt together with its continuation.
    """
    half = max(context // 2, 1)
    texts = [tokenizer.encode_source(prompt) for prompt in prompts]
    lengths = [len(text) + new_tokens for text in texts]
    for piece in range(-(-new_tokens // half)):  # ceil(new_tokens / half)
        windows = [text[-half:] for text in texts]
        generated = generate(
            model,
            params,
            windows,
            max_new_tokens=half,
            sampling=Sampling(temperature=temperature),
            seed=(seed + piece) % 2**32,  # another seed for each piece; seeds are 32-bit
        )
        texts = [text + new for text, new in zip(texts, generated, strict=True)]
    return [tokenizer.decode(text[:length]) for text, length in zip(texts, lengths, strict=True)]
