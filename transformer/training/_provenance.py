"""What a checkpoint was trained with: its recipe and tokenizer, compared with those that its workdir now holds."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.config._checks import ConfigError
from transformer.data._tokenizer import Tokenizer
from transformer.training._checkpoint import load_items
from transformer.training._manifest import find_steps
from transformer.training._recipe import FILE, Change, Recipe, difference, from_json

TOKENIZER = "tokenizer"
"""directory of a workdir that holds the run's tokenizer"""


class WorkdirError(ConfigError):
    """A workdir that holds another run than the one that was asked for, or a run that has been changed."""


@dataclass(frozen=True)
class Provenance:
    """What the checkpoint in `path` was trained with. Checkpoints of earlier versions do not record all of it: None."""

    path: Path
    recipe: Recipe | None
    recipe_file: str | None
    """name of the checkpoint's copy of recipe.json"""
    tokenizer: str | None
    """`tokenizer_fingerprint` of the tokenizer"""
    data: str | None
    """fingerprint of the data"""


def tokenizer_fingerprint(tokenizer: Tokenizer | None) -> str | None:
    """SHA-256 of everything that determines a tokenizer; None for no tokenizer."""
    if tokenizer is None:
        return None
    return hashlib.sha256(json.dumps(tokenizer.state(), sort_keys=True).encode()).hexdigest()


def provenance(workdir: str | os.PathLike, step: int) -> Provenance:
    """The provenance of a checkpoint that was verified before."""
    path, names, items = load_items(workdir, step)
    data: dict[str, Any] = items.get("data") or {}
    values = items.get("recipe")
    return Provenance(
        path=path,
        recipe=None if values is None else from_json(values, f"the recipe in {path}"),
        recipe_file=names.get("recipe"),
        tokenizer=data.get("tokenizer"),
        data=data.get("fingerprint"),
    )


def newest_provenance(workdir: str | os.PathLike) -> Provenance | None:
    """The provenance of the newest checkpoint; None if it is damaged, which whoever restores it reports."""
    try:
        return provenance(workdir, find_steps(Path(workdir) / "checkpoints")[-1])
    except (ValueError, OSError):
        return None


def check_recipe_of_command(old: Recipe, new: Recipe, workdir: str | os.PathLike) -> list[Change]:
    """The fields that a command changes of a run and may change.

    Raises:
        WorkdirError: it changes others.
    """
    fault = f"{workdir} holds a run that differs from this one in"
    return _check_same(old, new, fault, "Take these back to resume it, or give another --workdir to start anew.")


def check_unchanged(
    trained: Provenance, recipe: Recipe, tokenizer: Tokenizer | None, workdir: str | os.PathLike, *, resuming: bool
) -> None:
    """Raises WorkdirError if the recipe or the tokenizer is not the one that the checkpoint was trained with.

    Both opening a run and resuming one (`resuming`: the recipe is that of the command) call this.
    """
    if trained.recipe is not None:
        if resuming:
            check_recipe_of_command(trained.recipe, recipe, workdir)
        else:
            place = Path(workdir) / FILE
            fault = f"{place} was changed: it differs from the recipe that the checkpoint {trained.path} was trained"
            words = ["cp", str(trained.path / (trained.recipe_file or "")), str(place)]
            _check_same(trained.recipe, recipe, f"{fault} with, in", f"Restore it: {shlex.join(words)}")
    found = tokenizer_fingerprint(tokenizer)
    if None not in (trained.tokenizer, found) and found != trained.tokenizer:
        raise WorkdirError(
            f"{Path(workdir) / TOKENIZER} was changed: it is not the tokenizer that the checkpoint {trained.path} was "
            f"trained with (fingerprint {trained.tokenizer[:12]}, now {found[:12]}), so the model would read other "
            f"tokens. Restore it from a copy, or train in another --workdir."
        )


def _check_same(old: Recipe, new: Recipe, fault: str, remedy: str) -> list[Change]:
    must_match, may_change = difference(old, new)
    if must_match:
        raise WorkdirError(f"{fault} {'; '.join(map(str, must_match))}. {remedy}")
    return may_change
