"""Forecasts of held-out windows: the errors of a forecast without a model, and a picture."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import PyTree

from transformer.data._dataset import Batch
from transformer.data._series import from_model
from transformer.nn.kernels import portable
from transformer.training.tasks._evaluation import EvalLoss, Evaluation


def repetition_errors(batches: Iterable[Batch]) -> EvalLoss:
    """Return the errors of a forecast without a model, which repeats the last step of each look-back window."""
    squares = magnitudes = count = 0.0
    for batch in batches:
        errors = (batch["values"][:, -1:] - batch["targets"])[batch["weights"] > 0].astype(np.float64)
        squares, magnitudes = squares + np.square(errors).sum(), magnitudes + np.abs(errors).sum()
        count += errors.size
    return EvalLoss(float(squares / count), float(count), mae=float(magnitudes / count))


@functools.partial(jax.jit, static_argnames="model")
def _forecasts(model: nn.Module, params: PyTree, values: np.ndarray) -> jax.Array:
    return model.apply({"params": params}, values)


def draw_forecasts(run: Evaluation, path: Path) -> None:
    """Plot the first and the last unseen window in the original units, together with the forecasts of the model."""
    model, data = run.model, run.dataset.config
    batches = run.dataset.eval_batches(run.unseen)
    last = batches[-1]["weights"].nonzero()[0][-1]
    rows = [(batches[0], 0), (batches[-1], last)]
    values, targets = (np.stack([batch[name][row] for batch, row in rows]) for name in ("values", "targets"))
    forecast = jax.device_get(_forecasts(model.clone(execution=portable(model.execution)), run.params, values))
    shown = 2 * targets.shape[1]
    past, future, forecast = (from_model(data, array) for array in (values[:, -shown:], targets, forecast))
    from transformer.viz._forecasts import forecast_picture  # imported late: matplotlib is slow to import

    title = f"{run.name}: forecasts of {targets.shape[1]:,} steps from {values.shape[1]:,} steps"
    names = f"first window of the {run.unseen} split", f"last window of the {run.unseen} split"
    forecast_picture(past, future, forecast, data.columns, path, title=title, names=names)
