"""What a model is worth on data it never saw: its loss, and texts to read."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer.data._dataset import Batch
from transformer.data._tokenizer import Tokenizer
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.training._finite import first_bad_parameter
from transformer.training._recipe import Recipe, build_model
from transformer.training._step import EvalStep, Metrics, NonFiniteError, evaluation_sums


@dataclass(frozen=True)
class EvalLoss:
    """Means over held-out targets."""

    loss: float
    """nats per target; of forecasts the mean squared error"""
    targets: float
    """how many there were (their weight)"""
    accuracy: float | None = None
    """share of targets that were the likeliest; None of forecasts"""
    mae: float | None = None
    """mean absolute error of forecasts"""

    @property
    def measures(self) -> dict[str, float]:
        """All but their number, by name."""
        told = {"loss": self.loss, "accuracy": self.accuracy, "mae": self.mae}
        return {name: value for name, value in told.items() if value is not None}

    def __str__(self):
        if self.mae is not None:
            return f"MSE {self.loss:.4f}, MAE {self.mae:.4f}"
        return f"loss {self.loss:.4f}, accuracy {100 * self.accuracy:.2f} %"


def compiled_eval_step(recipe: Recipe) -> EvalStep:
    """`make_eval_step`, compiled once in a process for each task, model and size of batch."""
    return functools.partial(_eval_step, recipe.task, build_model(recipe))


@functools.partial(jax.jit, static_argnames=("task", "model"))
def _eval_step(task: str, model: nn.Module, params: Any, batch: Batch) -> Metrics:
    return dict(evaluation_sums(task, model, params, batch))


def evaluate_loss(
    eval_step: EvalStep,
    params: Any,
    batches: Iterable[Batch],
    should_stop: Callable[[], bool] = lambda: False,
    strict: bool = True,
) -> EvalLoss | None:
    """Loss over all batches, each target counted once by its weight; None when `should_stop` said so in between.
    Not `strict`, a loss that is not finite is a result as any other.

    Raises:
        ValueError: no target at all.
        NonFiniteError: the loss of a batch is not finite; names the batch, and the parameter where one is to blame.
    """
    sums: dict[str, float] = defaultdict(float)
    for number, batch in enumerate(batches):
        if should_stop():
            return None
        told = jax.device_get(eval_step(params, batch))
        if strict and not np.isfinite(told["loss_sum"]):
            bad = first_bad_parameter(params)
            cause = f"{bad} holds NaN or infinity" if bad else "every parameter is finite, so its logits are not"
            raise NonFiniteError(
                f"the loss of held-out batch {number} is {float(told['loss_sum']):g}: {cause}. Use an earlier "
                f"checkpoint, or compute in float32 (--model.dtype)."
            )
        for name, value in told.items():
            sums[name] += float(value)
    if not sums["weight"]:
        raise ValueError("there is nothing to evaluate on: the held-out data has no target. Hold out more of it.")
    means = {name: value / sums["weight"] for name, value in sums.items()}
    return EvalLoss(means["loss_sum"], sums["weight"], means.get("correct"), means.get("absolute_error"))


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
    """Prompts continued by sampling, each as prompt and continuation.

    A model trained on windows of `context` tokens doesn't know later positions, so the text is written in pieces, each
    after the last half window.
    """
    half = max(context // 2, 1)
    texts = [tokenizer.encode_source(prompt) for prompt in prompts]
    lengths = [len(text) + new_tokens for text in texts]
    for piece in range(-(-new_tokens // half)):
        windows = [text[-half:] for text in texts]
        written = generate(
            model,
            params,
            windows,
            max_new_tokens=half,
            sampling=Sampling(temperature=temperature),
            seed=(seed + piece) % 2**32,  # what a generation takes
        )
        texts = [text + new for text, new in zip(texts, written, strict=True)]
    return [tokenizer.decode(text[:length]) for text, length in zip(texts, lengths, strict=True)]
