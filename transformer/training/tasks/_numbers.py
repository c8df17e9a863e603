"""Tasks of models that read numbers: images and time series; pictures of forecasts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.data._dataset import DataKind
from transformer.data._series import from_model
from transformer.nn.kernels import portable
from transformer.nn.models._forecaster import Forecaster
from transformer.nn.models._kinds import example_inputs
from transformer.nn.models._vision import VisionClassifier
from transformer.training._settings import TrainingConfig
from transformer.training.tasks._base import LabelTask, Outputs, Shapes, Sums, Task
from transformer.training.tasks._evaluation import EvalLoss, Evaluation
from transformer.training.tasks._losses import Batch, Scalar, absolute_error, squared_error
from transformer.training.tasks._results import Results


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


class ValuesTask(Task):
    """Base class of tasks that read numbers, the batch's `values`."""

    tokens = False

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        (example,) = example_inputs(self.model(config))
        return {
            "values": jax.ShapeDtypeStruct((rows, *example.shape[1:]), jnp.float32),
            "targets": jax.ShapeDtypeStruct((rows,), jnp.int32),
            "weights": jax.ShapeDtypeStruct((rows,), jnp.float32),
        }


class ImageClassification(LabelTask, ValuesTask):
    """Predict the class of an image."""

    name = "image_classifier"
    model = VisionClassifier
    targets = "images"
    unit = "nats per image"
    part = "patches"

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        return {"images": batch["values"]}

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        return batch["weights"].shape[0], config.patches.positions  # learned tokens and one token per patch


class Forecasting(ValuesTask):
    """Forecast the next steps of a time series."""

    name = "forecaster"
    model = Forecaster
    outputs = "forecasts"
    targets = "forecast values"
    unit = "mean squared error"
    part = "series"
    remedy = "as many columns as the model (--data.columns), and its --data.context-length and --data.horizon"

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        return {"values": batch["values"]}

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        targets = jax.ShapeDtypeStruct((rows, config.series.horizon, config.series.channels), jnp.float32)
        return super().shapes(config, data, rows) | {"targets": targets}

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        # Channels are independent: each is a sequence of its own with the same parameters.
        return batch["weights"].shape[0] * config.series.channels, config.series.positions

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        # `tokens` counts every position of every channel. The head multiplies each sequence once, not once per
        # position; the embedding of a channel is used only by the sequences of that channel.
        shared = {"output": config.series.positions, "channel_embedding": config.series.channels}
        return super().tokens_through(config, path, tokens) // shared.get(path.partition("/")[0], 1)

    def check(self, training: TrainingConfig) -> None:
        if training.label_smoothing or training.z_loss:
            raise ConfigError(
                "training.label_smoothing and training.z_loss need logits, and forecasts have none. Leave them at 0."
            )
        super().check(training)

    def loss(self, outputs: Outputs, batch: Batch, training: TrainingConfig | None) -> tuple[Scalar, Scalar]:
        return squared_error(outputs, batch["targets"], batch["weights"])

    def measures(self, outputs: Outputs, batch: Batch) -> Sums:
        return {"absolute_error": absolute_error(outputs, batch["targets"], batch["weights"])}

    def sizes(self, batch: Batch) -> dict[str, int]:
        length, channels = batch["values"].shape[1:]
        return {"context_length": length, "channels": channels, "horizon": batch["targets"].shape[1]}

    def report(self, run: Evaluation, folder: Path) -> Results | None:
        found = super().report(run, folder)
        if not run.should_stop():
            draw_forecasts(run, folder / "forecasts.png")
        batches = run.dataset.eval_batches(run.unseen)
        return None if found is None else dataclasses.replace(found, baseline=repetition_errors(batches))
