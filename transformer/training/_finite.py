"""Explain a non-finite loss by the first non-finite parameter or output of the model."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from transformer.nn.kernels import portable
from transformer.nn.models._base import first_bad_parameter
from transformer.training._recipe import Recipe
from transformer.training.tasks._losses import Batch
from transformer.training.tasks._table import TASKS


def why_not_finite(recipe: Recipe, model: nn.Module, params: PyTree, batch: Batch) -> str:
    """Explain in one sentence why the loss of a batch is not finite; "" with several processes, each with its own rows
    only.

    The sentence names the first non-finite parameter. If all parameters are finite, it names the first row and position
    whose logits (or forecasts) are not finite without dropout. The model runs row by row, so that only the logits of
    one row, (1, T, V), are in memory.
    """
    if jax.process_count() > 1:
        return ""
    if (path := first_bad_parameter(params)) is not None:
        return f"The parameter {path} contains NaN or infinity."
    model = model.clone(execution=portable(model.execution))
    task = TASKS[recipe.task]

    @jax.jit
    def finite(params, row):
        outputs = task.forward(model, {"params": params}, row, deterministic=True, rngs=None)
        return jnp.isfinite(outputs).all(-1).all(0)  # (T,), of both responses of a pair; () for a classifier

    for row in range(len(batch["weights"])):
        bad = np.argwhere(~np.asarray(finite(params, {name: array[row : row + 1] for name, array in batch.items()})))
        if len(bad):
            place = f" at position {bad[0][0]}" if bad.shape[1] else ""
            return (
                f"All parameters are finite, but the {task.outputs} of row {row} are not{place}: a value overflowed "
                f"in {model.config.dtype}."
            )
    return f"All parameters are finite, and so are the {task.outputs} of the batch without dropout."
