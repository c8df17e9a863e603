"""The mean of a run's last checkpoints, as a workdir of its own (Vaswani et al. 2017, section 6.1)."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.training._checkpoint import Checkpointer, CheckpointError
from transformer.training._manifest import CheckpointWarning, find_steps, sync, sync_tree
from transformer.training._provenance import TOKENIZER, provenance
from transformer.training._recipe import Recipe, load_recipe, save_recipe, to_json
from transformer.training._restart import AVERAGE
from transformer.training._runs import is_average, load_own_tokenizer, load_usable


@dataclass(frozen=True)
class Averaged:
    """What `average` wrote: the workdir of the mean, and the steps of the checkpoints that it is of, ascending."""

    workdir: Path
    steps: tuple[int, ...]


def average(workdir: str | os.PathLike, last: int, to: str | os.PathLike | None = None) -> Averaged:
    """Writes the mean of the parameters of the newest `last` valid checkpoints into the workdir `to` (None: the run's
    with "-average-N"), which `load_run` opens as any other; the run's own is only read.

    The parameters are those that `load_run` would take: averaged ones where the run keeps an average, with LoRA merged
    ones. An earlier average is replaced; the new one is there whole or not at all. In memory are one set of parameters
    and the float32 sums of all.

    Raises:
        FileNotFoundError: no such workdir, or no checkpoint in it.
        CheckpointError: fewer valid checkpoints than `last`; damaged ones are named.
        ConfigError: `to` holds something else than an average, or `workdir` is one itself, or its recipe or tokenizer
            was changed.
    """
    workdir = Path(workdir)
    recipe = load_recipe(workdir)
    if to is None:
        named = workdir if workdir.name not in ("", "..") else Path(os.path.abspath(workdir))
        to = named.with_name(f"{named.name}-average-{last}")
    to = Path(to)
    _check_places(workdir, to)
    params, steps = _mean(recipe, workdir, last)
    facts = {"workdir": str(workdir), "steps": list(steps)}
    trained = provenance(workdir, steps[-1])
    recipe = dataclasses.replace(recipe, lora=None)  # its updates are in the parameters

    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as folder:
        new = Path(folder) / "new"
        new.mkdir()
        if (workdir / TOKENIZER).exists():
            shutil.copytree(workdir / TOKENIZER, new / TOKENIZER)
        save_recipe(recipe, new)
        (new / AVERAGE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        with Checkpointer(new) as checkpoints:
            data = {"fingerprint": trained.data, "tokenizer": trained.tokenizer, "average": facts}
            checkpoints.save(steps[-1], {"params": params}, data=data, recipe=to_json(recipe))
        sync_tree(new)
        if to.exists():
            os.rename(to, Path(folder) / "old")
        os.rename(new, to)
        sync(to.parent)
    return Averaged(to, steps)


def _check_places(workdir: Path, to: Path) -> None:
    if is_average(workdir):
        raise ConfigError(f"{workdir} holds an average of checkpoints already. Name the workdir of the run itself.")
    if to.exists() and not (to.is_dir() and (is_average(to) or not any(to.iterdir()))):
        raise ConfigError(f"{to} is there, and is no earlier average: it is not overwritten. Name another place: --to.")


def _mean(recipe: Recipe, workdir: Path, last: int) -> tuple[Any, tuple[int, ...]]:
    """The mean of the newest valid checkpoints, a tree of NumPy arrays in the parameters' types, and their steps."""
    root = workdir / "checkpoints"
    candidates = find_steps(root)
    if not candidates:
        raise FileNotFoundError(f"No checkpoint in {root}. Train first, or give the workdir of a run.")
    tokenizer = load_own_tokenizer(recipe, workdir)
    sums, dtypes, steps, damaged = None, None, [], []
    # Fewer than that can't do, whatever is in them: nothing is read.
    for step in reversed(candidates if len(candidates) >= last else []):
        if len(steps) == last:
            break
        try:
            params, _ = load_usable(recipe, tokenizer, workdir, step)
        except (CheckpointError, FileNotFoundError) as error:
            if (root / str(step)).exists():  # else the run that is training has just deleted it
                damaged.append(str(error.__cause__ or error))
            continue
        if sums is None:
            dtypes = jax.tree.map(lambda leaf: leaf.dtype, params)
            sums = jax.tree.map(lambda leaf: np.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32)), params)
        else:
            jax.tree.map(lambda total, leaf: np.add(total, leaf, out=total), sums, params)
        steps.append(step)
        del params  # before the next are read
    for reason in damaged:
        warnings.warn(f"left out of the average: {reason}.", CheckpointWarning, stacklevel=3)
    if len(steps) < last:
        there = f"{len(candidates)} checkpoints ({', '.join(map(str, candidates))})"
        raise CheckpointError(
            f"{last} checkpoints are to be averaged, but {root} has {there}"
            + (f", {len(damaged)} of them damaged: {'; '.join(damaged)}" if damaged else "")
            + f". Average fewer (--last), or train with --checkpoint.keep-last {last} to keep more."
        )
    kept = recipe.checkpoint.keep_last
    if last > kept:
        warnings.warn(
            f"the run keeps its last {kept} checkpoints (--checkpoint.keep-last); of the {last} averaged, step "
            f"{', '.join(map(str, sorted(steps)[:-kept]))} is there for its eval loss.",
            stacklevel=3,
        )
    mean = jax.tree.map(lambda total, dtype: np.divide(total, last, out=total).astype(dtype, copy=False), sums, dtypes)
    return mean, tuple(sorted(steps))
