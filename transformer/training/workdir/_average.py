"""Average the last checkpoints of a run into a new workdir (Vaswani et al. 2017, arXiv 1706.03762, section 6.1)."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.config._local_paths import local_path
from transformer.training import lora
from transformer.training._recipe import Recipe, load_recipe, save_recipe, to_json
from transformer.training.workdir._checkpoint import Checkpointer, CheckpointError
from transformer.training.workdir._manifest import CheckpointWarning, find_steps, sync, sync_tree
from transformer.training.workdir._provenance import TOKENIZER, provenance
from transformer.training.workdir._restart import AVERAGE
from transformer.training.workdir._runs import is_average, load_own_tokenizer, load_reference, load_usable


@dataclass(frozen=True)
class Averaged:
    """Result of `average`: the workdir of the averaged model, and the steps of the averaged checkpoints, ascending."""

    workdir: Path
    steps: tuple[int, ...]


def average(workdir: str | os.PathLike, last: int, to: str | os.PathLike | None = None) -> Averaged:
    """Write the mean of the parameters of the newest `last` valid checkpoints into a new workdir.

    `load_run` opens the new workdir `to` (default: the name of the run's workdir followed by "-average-N") like any
    other. The workdir of the run is only read. The parameters are those that `load_run` would return: the moving
    average if the run keeps one, and the merged parameters with LoRA. The reference model of a task that has one is
    copied, for evaluation. An earlier average in `to` is replaced atomically. Memory holds one set of parameters and
    one set of sums, in float32.

    Raises FileNotFoundError without a workdir or checkpoint; CheckpointError, which names damaged checkpoints, for
    fewer valid ones than `last`; and ConfigError if `to` contains something other than an average, or `workdir` is an
    average or its recipe or tokenizer was changed.
    """
    workdir = local_path(workdir, "workdir")
    recipe = load_recipe(workdir)
    if to is None:
        named = workdir if workdir.name not in ("", "..") else Path(os.path.abspath(workdir))
        to = named.with_name(f"{named.name}-average-{last}")
    to = local_path(to, "to")
    _check_places(workdir, to)
    params, steps = _mean(recipe, workdir, last)
    reference = load_reference(recipe, workdir, steps[-1])
    facts = {"workdir": str(workdir), "steps": list(steps)}
    trained = provenance(workdir, steps[-1])
    state = {"params": params}
    if reference is not None:  # as arrays: a recipe without LoRA has no quantized kernels
        state["base"] = lora.flatten_adapted(reference)
    recipe = dataclasses.replace(recipe, lora=None)  # the LoRA updates are already merged into the parameters

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
            checkpoints.save(steps[-1], state, data=data, recipe=to_json(recipe))
        sync_tree(new)
        if to.exists():
            os.rename(to, Path(folder) / "old")
        os.rename(new, to)
        sync(to.parent)
    return Averaged(to, steps)


def _check_places(workdir: Path, to: Path) -> None:
    if is_average(workdir):
        raise ConfigError(
            f"{workdir} already is an average of checkpoints, expected a run. Pass the workdir of the run itself."
        )
    if to.exists() and not (to.is_dir() and (is_average(to) or not any(to.iterdir()))):
        raise ConfigError(
            f"{to} exists and is not an earlier average, so it is not overwritten. Pass another path with --to."
        )


def _mean(recipe: Recipe, workdir: Path, last: int) -> tuple[PyTree, tuple[int, ...]]:
    """Return the mean of the newest `last` valid checkpoints, in the dtypes of the parameters, and their steps."""
    root = workdir / "checkpoints"
    candidates = find_steps(root)
    if not candidates:
        raise FileNotFoundError(f"No checkpoint in {root}. Train first, or pass the workdir of a run.")
    tokenizer = load_own_tokenizer(recipe, workdir)
    sums, dtypes, steps, damaged = None, None, [], []
    # With fewer than `last` checkpoints the average fails anyway, so none of them is read.
    for step in reversed(candidates if len(candidates) >= last else []):
        if len(steps) == last:
            break
        try:
            params, _ = load_usable(recipe, tokenizer, workdir, step)
        except (CheckpointError, FileNotFoundError) as error:
            if (root / str(step)).exists():  # otherwise, a run in progress has just deleted it
                damaged.append(str(error.__cause__ or error))
            continue
        if sums is None:
            dtypes = jax.tree.map(lambda leaf: leaf.dtype, params)
            # Sum in at least float32: bfloat16 has 8 significant bits, so a running sum would lose the small terms.
            sums = jax.tree.map(lambda leaf: np.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32)), params)
        else:
            jax.tree.map(lambda total, leaf: np.add(total, leaf, out=total), sums, params)  # in place: no second sum
        steps.append(step)
        del params  # free them before the next checkpoint is read
    for reason in damaged:
        warnings.warn(f"excluded from the average: {reason}.", CheckpointWarning, stacklevel=3)
    if len(steps) < last:
        available = f"{len(candidates)} checkpoints ({', '.join(map(str, candidates))})"
        raise CheckpointError(
            f"cannot average {last} checkpoints: {root} has {available}"
            + (f", {len(damaged)} of them damaged: {'; '.join(damaged)}" if damaged else "")
            + f". Average fewer (--last), or train with --checkpoint.keep-last {last} to keep more."
        )
    kept = recipe.checkpoint.keep_last
    if last > kept:
        warnings.warn(
            f"the run keeps its last {kept} checkpoints (--checkpoint.keep-last); of the {last} averaged, step "
            f"{', '.join(map(str, sorted(steps)[:-kept]))} was kept because of its eval loss.",
            stacklevel=3,
        )
    # Divide in float32, then cast once to the dtype of the parameters.
    mean = jax.tree.map(lambda total, dtype: np.divide(total, last, out=total).astype(dtype, copy=False), sums, dtypes)
    return mean, tuple(sorted(steps))
