"""Provenance of checkpoints: recipe, tokenizer and data, compared with those of a workdir; the changes that may be."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import Tokenizer
from transformer.training._optimizers import decay_end, learning_rates
from transformer.training._recipe import FILE, Change, Recipe, difference, from_json
from transformer.training.workdir._checkpoint import load_items
from transformer.training.workdir._manifest import find_steps

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


TOKENIZER = "tokenizer"
"""directory of a workdir that holds the run's tokenizer"""


class WorkdirError(ConfigError):
    """The workdir contains a different run than requested, or a run whose files have been changed."""


@dataclass(frozen=True)
class Provenance:
    """Recipe, tokenizer and data of the checkpoint in `path`."""

    path: Path
    recipe: Recipe
    recipe_file: str
    """name of the checkpoint's copy of recipe.json"""
    tokenizer: str | None
    """`tokenizer_fingerprint` of its tokenizer; None if the model reads no tokens"""
    data: str
    """fingerprint of its training data"""


def tokenizer_fingerprint(tokenizer: Tokenizer | None) -> str | None:
    """Return the SHA-256 of everything that determines a tokenizer; None without a tokenizer."""
    if tokenizer is None:
        return None
    return hashlib.sha256(json.dumps(tokenizer.state(), sort_keys=True).encode()).hexdigest()


def provenance(workdir: str | os.PathLike, step: int) -> Provenance:
    """Return the provenance of a checkpoint, which must be verified already."""
    path, names, items = load_items(workdir, step)
    return Provenance(
        path=path,
        recipe=from_json(items["recipe"], f"the recipe in {path}"),
        recipe_file=names["recipe"],
        tokenizer=items["data"]["tokenizer"],
        data=items["data"]["fingerprint"],
    )


def newest_provenance(workdir: str | os.PathLike) -> Provenance | None:
    """Return the provenance of the newest checkpoint; None if it is damaged (restoring it reports the damage)."""
    try:
        return provenance(workdir, find_steps(Path(workdir) / "checkpoints")[-1])
    except (ValueError, OSError):
        return None


def check_recipe_of_command(
    old: Recipe, new: Recipe, workdir: str | os.PathLike, allow_change: bool = False
) -> list[Change]:
    """Return the fields that a command changes in an existing run; WorkdirError if one of them must match on resume."""
    fault = f"{workdir} contains a run that differs from this command in"
    remedy = "Remove these overrides to resume it, or pass another --workdir to start a new run."
    step = max(find_steps(Path(workdir) / "checkpoints"), default=0)
    return _check_same(old, new, step, fault, remedy, allow_change)


def check_unchanged(
    trained: Provenance,
    recipe: Recipe,
    tokenizer: Tokenizer | None,
    workdir: str | os.PathLike,
    *,
    resuming: bool,
    allow_change: bool = False,
) -> None:
    """Raise WorkdirError if the recipe or the tokenizer are not those that the checkpoint was trained with.

    `recipe` is that of the workdir or, with `resuming`, that of the command, in which some fields may differ.
    """
    if resuming:
        check_recipe_of_command(trained.recipe, recipe, workdir, allow_change)
    else:
        place = Path(workdir) / FILE
        fault = f"{place} was changed: it differs from the recipe of the checkpoint {trained.path}"
        remedy = f"Restore it: {shlex.join(['cp', str(trained.path / trained.recipe_file), str(place)])}"
        step = int(trained.path.name)
        _check_same(trained.recipe, recipe, step, f"{fault} in", remedy, allow_change, not allow_change)
    found = tokenizer_fingerprint(tokenizer)
    if None not in (trained.tokenizer, found) and found != trained.tokenizer:
        raise WorkdirError(
            f"{Path(workdir) / TOKENIZER} was changed: it is not the tokenizer that the checkpoint {trained.path} was "
            f"trained with (fingerprint {trained.tokenizer[:12]}, now {found[:12]}), so the model would read wrong "
            f"tokens. Restore it from a copy, or train in another --workdir."
        )


def _check_same(
    old: Recipe, new: Recipe, step: int, fault: str, remedy: str, allow_change: bool, names_flag: bool = True
) -> list[Change]:
    """Return the fields that differ and may after `step` steps; WorkdirError, with or without the flag, for others."""
    must_match, may_change = schedule_change(old, new, step, *difference(old, new))
    optional = [change for change in must_match if allowable(change, new)]
    more = ""
    if allow_change:
        must_match, may_change = [one for one in must_match if one not in optional], may_change + optional
        more = "--allow-change does not accept them: they change shapes, data or what the model computes. "
    elif optional and len(optional) == len(must_match):
        more = "Pass --allow-change (in Python: allow_change=True) to resume with the new values. "
    elif optional:
        more = f"Of these, --allow-change accepts only {', '.join(one.field for one in optional)}. "
    if must_match:
        raise WorkdirError(f"{fault} {'; '.join(map(str, must_match))}. {more if names_flag else ''}{remedy}")
    return may_change
