"""Provenance of checkpoints: the recipe, tokenizer and data of a checkpoint, compared with those of its workdir."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import Tokenizer
from transformer.training._recipe import FILE, Change, Recipe, difference, from_json
from transformer.training.workdir._changes import allowable, schedule_change
from transformer.training.workdir._checkpoint import load_items
from transformer.training.workdir._manifest import find_steps

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
