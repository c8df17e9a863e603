"""Which number is not finite, looked for when something went wrong: a parameter, or what the model makes of a row."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn.kernels import portable
from transformer.training._losses import Batch
from transformer.training._recipe import Recipe
from transformer.training._tasks import TASKS


def first_bad_parameter(params: Any) -> str | None:
    """The path of the first parameter of a tree that holds NaN or infinity; None: there is none."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    bad = (path for path, leaf in leaves if not jnp.isfinite(leaf).all())
    path = next(bad, None)
    return None if path is None else jax.tree_util.keystr(path, simple=True, separator="/")


def why_not_finite(recipe: Recipe, model: nn.Module, params: Any, batch: Batch) -> str:
    """A sentence about a batch whose loss was not finite: the parameter of the tree `params` to blame, or else the
    first row and position whose logits (or forecasts) are not finite, without dropout. "" where several processes
    train together: each has only its own rows.

    Row by row, so that there are never more than the logits of one row, (1, T, V).
    """
    if jax.process_count() > 1:
        return ""
    if (path := first_bad_parameter(params)) is not None:
        return f"The parameter {path} holds NaN or infinity."
    model = model.clone(execution=portable(model.execution))
    task = TASKS[recipe.task]

    @jax.jit
    def finite(params, row):
        outputs = task.forward(model, {"params": params}, row, deterministic=True, rngs=None)
        return jnp.isfinite(outputs).all(-1)[0]  # (T,), or () of a class

    for row in range(len(batch["weights"])):
        bad = np.argwhere(~np.asarray(finite(params, {name: array[row : row + 1] for name, array in batch.items()})))
        if len(bad):
            place = f" at position {bad[0][0]}" if bad.shape[1] else ""
            return (
                f"All parameters are finite, but the {task.outputs} of row {row} are not{place}: a number overflowed "
                f"in {model.config.dtype}."
            )
    return f"All parameters are finite, and so are the {task.outputs} of the batch without dropout."
