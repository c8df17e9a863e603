"""Fields of a recipe that `--allow-change` lets a resumed run change: neither shapes nor the order of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer.training._recipe import Change, Recipe

OPTIMIZATION = (
    *("optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_steps"),
    *("optimizer.final_fraction", "optimizer.decay_fraction", "optimizer.beta1", "optimizer.beta2"),
    *("optimizer.epsilon", "optimizer.momentum", "optimizer.weight_decay", "optimizer.decay_embeddings"),
    *("optimizer.clip_norm", "training.label_smoothing", "training.z_loss", "training.loss_tokens"),
    *("training.embedding_gradient_dtype", "training.ema_decay", "model.dropout_rate", "model.attention.dropout_rate"),
)
"""fields that change the following updates, but neither the parameters that a checkpoint has nor what they compute"""

SWITCHES = ("optimizer.weight_decay", "optimizer.clip_norm", "training.ema_decay")
"""fields that add a part to the training state if they are not 0 or None, so that they can't be turned on or off"""

BATCH_SIZE = "data.batch_size"


def allowable(change: Change, new: Recipe) -> bool:
    """Return whether `--allow-change` accepts a change of a field; `new` is the recipe of the command."""
    if change.field == BATCH_SIZE:
        return _consecutive(new)
    if change.field in SWITCHES:
        return bool(change.old) == bool(change.new)
    return change.field in OPTIMIZATION


def _consecutive(recipe: Recipe) -> bool:
    """Return whether batches are consecutive parts of one sequence of rows, which the batch size does not change."""
    return all(getattr(recipe.data, field, None) is None for field in ("batch_tokens", "packed_length"))


def moved(position: Mapping[str, Any], old: Recipe | None, new: Recipe) -> Mapping[str, Any]:
    """Return the position in the data, counted in batches of the new size.

    The rows that follow are those that the run has not seen. If the number of rows seen is no multiple of the new batch
    size, the last of them (fewer than one batch) are repeated.
    """
    if old is None or getattr(old.data, "batch_size", None) == getattr(new.data, "batch_size", None):
        return position
    if not _consecutive(new):
        return position
    return {**position, "next_index": position["next_index"] * old.data.batch_size // new.data.batch_size}
