"""Classification of time series."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from transformer.config._checks import ConfigError
from transformer.inference._loading import LoadedModel
from transformer.inference._text_inputs import Class, class_names, class_of, finite
from transformer.nn.models._series import SeriesClassifier

BATCH = 64
"""Number of series that the model reads at the same time."""


def classify_series(opened: LoadedModel, series: Sequence[Any]) -> list[Class]:
    """Return the most probable class of each time series.

    Args:
        opened: a classifier of time series (PatchTST).
        series: (n, context_length, channels), or a list of n arrays (context_length, channels), in any unit that
            training used.

    Raises:
        ConfigError: the model is no classifier of time series, or its outputs are not probabilities of mutually
            exclusive classes.
        ValueError: no series, series of another shape, or results that are not finite.
    """
    if not isinstance(opened.model, SeriesClassifier):
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(opened.model).__name__}, which does not classify "
            f"time series. Pass the weights of a PatchTSTForClassification."
        )
    names = class_names(opened)
    values = np.asarray(series, np.float32)
    if not len(values):
        raise ValueError("there are no series. Pass at least one.")
    size, rows = min(len(values), BATCH), []
    for first in range(0, len(values), BATCH):
        part = values[first : first + BATCH]
        filled = np.concatenate([part, np.repeat(part[-1:], size - len(part), axis=0)])  # one program for all batches
        rows += list(np.asarray(_probabilities(opened.model, opened.params, filled)))[: len(part)]
    return [class_of(finite(opened, number, row, "series"), names) for number, row in enumerate(rows)]


@functools.partial(jax.jit, static_argnames="model")
def _probabilities(model: SeriesClassifier, params: Any, values: jax.Array) -> jax.Array:
    """Return the class probabilities (B, C) of series. Compiled once per model and batch shape."""
    return jax.nn.softmax(model.apply({"params": params}, values))  # over C
