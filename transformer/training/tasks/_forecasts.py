"""Final evaluation without generated text: measures on a held-out split, and a plot of forecasts."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer.data._dataset import Batch, Dataset
from transformer.data._series import from_model
from transformer.nn.kernels import portable
from transformer.training._recipe import Recipe
from transformer.training.metrics._summary import Summary
from transformer.training.tasks._evaluation import EvalLoss, compiled_eval_step, evaluate_loss
from transformer.training.tasks._table import TASKS


def measured(
    recipe: Recipe,
    params: Any,
    dataset: Dataset,
    summary: Summary,
    should_stop: Callable[[], bool],
    reference: Any = None,
) -> Summary:
    """Return the summary with the measures of the model and the baseline on the test (or else validation) split."""
    split = "test" if "test" in dataset.splits else "validation"
    batches = dataset.eval_batches(split)
    strict = recipe.training.nan_policy == "stop"
    recipe = dataclasses.replace(recipe, execution=portable(recipe.execution))  # there is no mesh here
    result = evaluate_loss(compiled_eval_step(recipe, reference), params, batches, should_stop, strict)
    if result is None:
        return summary
    predict = TASKS[recipe.task].baseline
    baseline = None if predict is None else baseline_errors(predict, batches)
    return dataclasses.replace(summary, split=split, held_out=result, baseline=baseline)


def baseline_errors(predict: Callable[[Batch], np.ndarray], batches: Iterable[Batch]) -> EvalLoss:
    """Return the errors of `Task.baseline`, a prediction without a model, over all batches."""
    squares = magnitudes = count = 0.0
    for batch in batches:
        errors = (predict(batch) - batch["targets"])[batch["weights"] > 0].astype(np.float64)
        squares, magnitudes = squares + np.square(errors).sum(), magnitudes + np.abs(errors).sum()
        count += errors.size
    return EvalLoss(float(squares / count), float(count), mae=float(magnitudes / count))


@functools.partial(jax.jit, static_argnames="model")
def _forecasts(model: nn.Module, params: Any, values: np.ndarray) -> jax.Array:
    return model.apply({"params": params}, values)


def draw_forecasts(
    recipe: Recipe, model: nn.Module, params: Any, dataset: Dataset, png_path: str | os.PathLike
) -> None:
    """Plot the first and the last held-out window in the original units, together with the forecasts of the model."""
    split = "test" if "test" in dataset.splits else "validation"
    batches = dataset.eval_batches(split)
    last = batches[-1]["weights"].nonzero()[0][-1]
    rows = [(batches[0], 0), (batches[-1], last)]
    values, targets = (np.stack([batch[name][row] for batch, row in rows]) for name in ("values", "targets"))
    forecast = jax.device_get(_forecasts(model.clone(execution=portable(model.execution)), params, values))
    shown = 2 * targets.shape[1]
    past, future, forecast = (from_model(recipe.data, array) for array in (values[:, -shown:], targets, forecast))
    from transformer.viz._forecasts import forecast_picture  # imported late: matplotlib is slow to import

    title = f"{recipe.name}: forecasts of {targets.shape[1]:,} steps from {values.shape[1]:,} steps"
    names = f"first window of the {split} split", f"last window of the {split} split"
    forecast_picture(past, future, forecast, recipe.data.columns, png_path, title=title, names=names)
