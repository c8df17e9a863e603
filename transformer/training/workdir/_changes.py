"""Fields of a recipe that `--allow-change` lets a resumed run change: neither shapes nor the order of the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from transformer.training._optimizers import decay_end, learning_rates
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


STEPS, DECAY_STEPS = "training.steps", "optimizer.decay_steps"


def schedule_change(
    old: Recipe, new: Recipe, step: int, must_match: Sequence[Change], may_change: Sequence[Change]
) -> tuple[list[Change], list[Change]]:
    """Move changes between those that must match and those that may change, by their effect on the learning rate.

    Another number of steps changes the learning rate of a schedule that decays until the last step. It must match if
    the `step` updates that are done would have had another rate. The step at which the decay ends may be set to the one
    that it had anyway.
    """
    before, after = decay_end(old), decay_end(new)
    kept = [one for one in must_match if one.field != DECAY_STEPS or None in (before, after) or before != after]
    free = [*may_change, *(one for one in must_match if one not in kept)]
    steps = next((one for one in may_change if one.field == STEPS), None)
    if steps is None or None in (before, after) or before == after or old.optimizer != new.optimizer or not step:
        return kept, free
    (last, _), (planned, following) = learning_rates(old, step - 1, step), learning_rates(new, step - 1, step)
    if last == planned:
        return kept, free
    noted = dataclasses.replace(steps, effect=_effect(old, new, step, last, following))
    return [*kept, noted], [one for one in free if one is not steps]


def _effect(old: Recipe, new: Recipe, step: int, last: float, following: float) -> str:
    (end,) = learning_rates(old, max(step, decay_end(old)))
    return (
        f"the learning rate was {last:.3g} at step {step} and becomes {following:.3g}, because the decay "
        f"({new.optimizer.schedule}) now ends at step {decay_end(new)}; --optimizer.decay-steps {decay_end(old)} keeps "
        f"the schedule, whose last rate is {end:.3g}"
    )


def how_to_extend(command: str, recipe: Recipe) -> str:
    """Return the lines with the commands that train a finished run for twice as many steps."""
    steps = recipe.training.steps
    longer, end = f"{command} --training.steps {2 * steps}", decay_end(recipe)
    (rate,) = learning_rates(recipe, steps)
    if end is None or recipe.optimizer.decay_steps is not None:
        return f"To train it longer, from a learning rate of {rate:.3g} on:\n  {longer}"
    extended = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, steps=2 * steps))
    (again,) = learning_rates(extended, steps)
    kept = [f"To train it longer with the last learning rate, {rate:.3g}:", f"  {longer} --optimizer.decay-steps {end}"]
    what = "To decay again, from" if rate else "The last learning rate is 0. To train it longer, from"
    return "\n".join([*(kept if rate else ()), f"{what} a learning rate of {again:.3g}:", f"  {longer} --allow-change"])


def allowable(change: Change, new: Recipe) -> bool:
    """Return whether `--allow-change` accepts a change of a field; `new` is the recipe of the command."""
    if change.field == BATCH_SIZE:
        return _consecutive(new)
    if change.field in SWITCHES:
        return bool(change.old) == bool(change.new)
    return change.field in (*OPTIMIZATION, STEPS)


def _consecutive(recipe: Recipe) -> bool:
    """Return whether batches are consecutive parts of one sequence of rows, which the batch size does not change."""
    return all(getattr(recipe.data, field, None) is None for field in ("batch_tokens", "packed_length"))


def moved(position: Mapping[str, Any], old: Recipe | None, new: Recipe) -> Mapping[str, Any]:
    """Return the position in the data in batches of the new size; fewer rows than one batch may be repeated."""
    if old is None or getattr(old.data, "batch_size", None) == getattr(new.data, "batch_size", None):
        return position
    if not _consecutive(new):
        return position
    return {**position, "next_index": position["next_index"] * old.data.batch_size // new.data.batch_size}
