"""Workdirs: opening one to train in, and loading what was trained."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn

from transformer.config._checks import ConfigError
from transformer.data._dataset import Dataset
from transformer.data._pipeline import prepare as prepare_data
from transformer.data._tokenizer import Tokenizer
from transformer.data._tokenizer_kinds import load_tokenizer
from transformer.data.kinds import PLACES
from transformer.training import _processes as processes
from transformer.training._checkpoint import Checkpointer, CheckpointError, load_params
from transformer.training._journal import TrainStats
from transformer.training._parallel import Placement
from transformer.training._provenance import (
    TOKENIZER,
    WorkdirError,
    check_recipe_of_command,
    check_unchanged,
    newest_provenance,
    provenance,
    tokenizer_fingerprint,
)
from transformer.training._recipe import (
    FILE,
    Recipe,
    build_model,
    load_recipe,
    save_recipe,
    to_json,
    with_labels,
    with_vocabulary,
)
from transformer.training._restart import AVERAGE, check_not_lost, has_checkpoints
from transformer.training._start import Start, begun_from, told, with_new_parameters, with_recipe_s
from transformer.training._state import TrainState, model_params
from transformer.training._tasks import TASKS

__all__ = [
    *("Run", "WorkdirError", "begin", "checkpoint_data", "has_checkpoints", "is_average", "load_own_tokenizer"),
    *("load_run", "load_usable", "open_run", "record_run", "shared_facts"),
]


@dataclass(frozen=True)
class Run:
    """A trained model, ready to use: `params` without the outer "params", `step` of the checkpoint they are from."""

    recipe: Recipe
    model: nn.Module
    params: Any
    tokenizer: Tokenizer | None
    """None: it reads no tokens"""
    step: int
    fingerprint: str | None = None
    """of the data that it was trained on; None: nothing says"""


def load_run(workdir: str | os.PathLike, step: Literal["best", "newest"] | int = "best") -> Run:
    """What a workdir holds: averaged parameters where the run kept them, with LoRA its updates merged into the base;
    "best" is the lowest eval/loss, of a classifier the highest eval/accuracy.

    Where no checkpoint can be called best, or the best one is damaged, the newest valid one is taken, with a warning.
    An average of checkpoints has but one.

    Raises:
        FileNotFoundError: no such workdir, or no checkpoint in it (or not that one).
        WorkdirError: the recipe or the tokenizer is not the one that the checkpoint was trained with.
        ValueError: a recipe, tokenizer or checkpoint that can't be read; the message names it.
    """
    recipe = load_recipe(workdir)
    tokenizer = load_own_tokenizer(recipe, workdir)
    if step == "best" and is_average(workdir):
        step = "newest"
    try:
        params, found = load_usable(recipe, tokenizer, workdir, step)
    except CheckpointError as error:
        if step != "best":
            raise
        warnings.warn(f"{error} Taking the newest valid checkpoint.", stacklevel=2)
        params, found = load_usable(recipe, tokenizer, workdir, "newest")
    return Run(recipe, build_model(recipe), params, tokenizer, found, provenance(workdir, found).data)


def load_own_tokenizer(recipe: Recipe, workdir: str | os.PathLike) -> Tokenizer | None:
    """The tokenizer of a run; None for a task that reads no tokens. Raises as `load_tokenizer`."""
    return load_tokenizer(Path(workdir) / TOKENIZER) if TASKS[recipe.task].tokens else None


def load_usable(
    recipe: Recipe, tokenizer: Tokenizer | None, workdir: str | os.PathLike, step: Literal["best", "newest"] | int
) -> tuple[Any, int]:
    """The model's parameters, a tree, of a checkpoint, and its step: averaged where the run kept an average, with LoRA
    the updates merged into the base. Raises as `load_params`, and WorkdirError if the checkpoint was trained with
    another recipe or tokenizer.
    """
    params, found = load_params(workdir, step=step, names=("ema", "params"))
    check_unchanged(provenance(workdir, found), recipe, tokenizer, workdir, resuming=False)
    if recipe.lora is not None:
        base, _ = load_params(workdir, step=found, names="base")
        params = model_params(recipe, {"new": {}, **params}, base)  # what is empty is not saved
    return params, found


def is_average(workdir: str | os.PathLike) -> bool:
    """Whether a workdir holds an average of checkpoints, and no run that can go on."""
    return (Path(workdir) / AVERAGE).exists()


def open_run(
    recipe: Recipe,
    workdir: str | os.PathLike,
    say: Callable[[str], None],
    start: Start | None = None,
    restart: bool = False,
) -> tuple[Recipe, Dataset]:
    """Complete the recipe from its data and `start`, and return both, to begin a run or to resume the one in the
    workdir, which records what it was initialized from.

    Writes no files. Allowed changes of a resumed run are reported by calling `say`. With `restart` the run is new,
    whatever the workdir contains.

    Raises:
        WorkdirError: the workdir holds checkpoints of another model, data, optimizer, start or seed; shows the
            difference. Or it holds an average of checkpoints, or a run whose checkpoints are gone; or it was to start
            from a model, and has no checkpoint yet, or with `restart`, and no `start` is given.
        ConfigError: LoRA without a model to update, or one that has not the recipe's parameters.
        ValueError: data that can't be read, or that doesn't fit the model.
    """
    workdir = Path(workdir)
    resumes = has_checkpoints(workdir) and not restart
    if not restart:
        _check_resumable(workdir)
    tokenizer = None if start is None else start.tokenizer
    recipe = recipe if start is None else start.applied_to(recipe)
    old = load_recipe(workdir) if (workdir / FILE).exists() and (resumes or start is None) else None
    if resumes:
        if (workdir / TOKENIZER).exists():
            tokenizer = load_tokenizer(workdir / TOKENIZER)
        if old is not None:
            recipe = _resumed(recipe, old, tokenizer, workdir, say)
    elif start is None and old is not None:
        _check_origin_given(old, workdir, restart)
    dataset = prepare_data(recipe.data, tokenizer=tokenizer)
    recipe = _decided_by_data(recipe, dataset)
    _check_shapes(recipe, dataset)
    if start is not None:
        recipe = with_new_parameters(recipe, start)
    if recipe.lora is not None and recipe.origin is None:
        raise ConfigError("lora updates a model that was trained before, but there is none: name one with --init DIR.")
    return recipe, dataset


def _check_resumable(workdir: Path) -> None:
    """Raises WorkdirError if the workdir holds an average of checkpoints, or a run whose checkpoints are gone."""
    if is_average(workdir):
        raise WorkdirError(
            f"{workdir} holds an average of checkpoints, without the optimizer's state: no run can go on from it. "
            f"Train in another --workdir; --init {workdir} starts a new run from these parameters."
        )
    check_not_lost(workdir)


def _check_origin_given(old: Recipe, workdir: Path, restart: bool) -> None:
    """Raises WorkdirError if the run was initialized from a model, which a first or a new run needs again."""
    if old.origin is None:
        return
    source = old.origin.source
    if restart:
        raise WorkdirError(
            f"the run in {workdir} was initialized from {source}. To begin anew, give --init {source} (or another "
            f"model) beside --restart; without one, train in another --workdir."
        )
    raise WorkdirError(
        f"{workdir} was to start from {source} and has no checkpoint yet: nothing of it is here. Give --init {source} "
        f"again."
    )


def _resumed(
    recipe: Recipe, old: Recipe, tokenizer: Tokenizer | None, workdir: Path, say: Callable[[str], None]
) -> Recipe:
    """The recipe of a run that is resumed, with what data or a start had decided; changes are reported to `say`.

    Raises:
        WorkdirError: a change that no resumed run can make.
    """
    if trained := newest_provenance(workdir):  # before the data is tokenized
        check_unchanged(trained, old, tokenizer, workdir, resuming=False)
    recipe = _filled_in(recipe, old)
    for change in check_recipe_of_command(old, recipe, workdir):
        say(f"changed since the last call: {change}")
    return recipe


def _decided_by_data(recipe: Recipe, dataset: Dataset) -> Recipe:
    """The recipe with the sizes of vocabulary and classes, and all that its data decides."""
    recipe = dataclasses.replace(recipe, data=dataset.config)
    if dataset.tokenizer is not None:
        recipe = with_vocabulary(recipe, dataset.tokenizer.vocab_size)
    if TASKS[recipe.task].labels:
        recipe = with_labels(recipe, recipe.data.labels)
    return recipe


def record_run(recipe: Recipe, dataset: Dataset, workdir: str | os.PathLike) -> None:
    """Writes what `load_run` needs beside the checkpoints: recipe.json and, of texts, the tokenizer."""
    if dataset.tokenizer is not None:
        dataset.tokenizer.save_alone(Path(workdir) / TOKENIZER)
    save_recipe(recipe, workdir)


def begin(
    recipe: Recipe,
    dataset: Dataset,
    workdir: str | os.PathLike,
    checkpoints: Checkpointer,
    batches: Any,
    placement: Placement,
    start: Start | None = None,
) -> tuple[TrainState, TrainStats]:
    """The newest valid checkpoint, with `batches` set to where it was; a new state, from `start` where one is given,
    when there is no checkpoint.

    Raises:
        CheckpointError: checkpoints, but none that is valid and fits.
        WorkdirError: one of another recipe, or of other data.
    """
    if not processes.first_decides(lambda: has_checkpoints(workdir)):
        if start is None:
            return placement.new_state(), TrainStats()
        print(told(recipe, start))
        return begun_from(start, placement.new_state()), TrainStats()
    restored = checkpoints.restore_newest(placement.abstract_state())
    trained = provenance(workdir, restored.step)
    filled = recipe if trained.recipe is None else _filled_in(recipe, trained.recipe)
    check_unchanged(trained, filled, dataset.tokenizer, workdir, resuming=True)
    if not dataset.is_known_as(restored.data["fingerprint"]):
        raise WorkdirError(
            f"the data has changed since {workdir} was trained on it (fingerprint {restored.data['fingerprint'][:12]}, "
            f"now {dataset.fingerprint[:12]}): going on would mix two data sets. Put the old data back, or give "
            f"another --workdir."
        )
    batches.set_state(restored.data["batches"])
    return restored.state, TrainStats(**restored.data["ledger"])


def checkpoint_data(dataset: Dataset, batches: Any, ledger: TrainStats) -> dict[str, Any]:
    """What a checkpoint holds beside the state, for `begin`."""
    return {
        "batches": batches.get_state(),
        "ledger": dataclasses.asdict(ledger),
        "fingerprint": dataset.fingerprint,
        "tokenizer": tokenizer_fingerprint(dataset.tokenizer),
    }


def shared_facts(recipe: Recipe) -> str:
    """All of a recipe that processes which train together must have alike: not who they are, nor where files lie."""
    values = to_json(recipe)["recipe"]
    for field in ("coordinator", "num_processes", "process_id", "patience"):
        del values["parallel"][field]
    for field in PLACES:
        values["data"].pop(field, None)
    if values["origin"] is not None:
        del values["origin"]["source"]
    return json.dumps(values, sort_keys=True)


def _filled_in(new: Recipe, old: Recipe) -> Recipe:
    """The new recipe with what it leaves open as the run had it: what data or a start decided."""
    if old.origin is not None and new.origin is None:
        new = dataclasses.replace(new, model=with_recipe_s(old.model, new.model), origin=old.origin)
    elif old.origin is not None:
        new = dataclasses.replace(new, origin=dataclasses.replace(new.origin, new=old.origin.new))
    if new.model.vocab_size is None and old.model.vocab_size is not None:
        new = with_vocabulary(new, old.model.vocab_size)
    if type(new.data) is type(old.data):
        decided = ("labels", "columns", "mean", "std")
        if getattr(new.data, "columns", ()) not in ((), getattr(old.data, "columns", ())):
            decided = ("labels",)  # mean and std are of the columns that the run had
        open_fields = [name for name in decided if getattr(new.data, name, None) == ()]
        fields = {name: getattr(old.data, name) for name in open_fields}
        new = dataclasses.replace(new, data=dataclasses.replace(new.data, **fields))
    if TASKS[new.task].labels and new.data.labels:
        new = with_labels(new, new.data.labels)
    return new


def _check_shapes(recipe: Recipe, dataset: Dataset) -> None:
    """ConfigError where the model reads or writes numbers of another shape than the data has, or fewer tokens."""
    model, task, batch = recipe.model, TASKS[recipe.task], dataset.eval_batches(limit=1)[0]
    if not task.tokens:
        sizes = {field: (getattr(getattr(model, task.part), field), new) for field, new in task.sizes(batch).items()}
        unlike = [f"{field} {old} where the data has {new}" for field, (old, new) in sizes.items() if old != new]
        if unlike and recipe.origin is not None:
            raise ConfigError(
                f"the model of {recipe.origin.source} has {', '.join(unlike)}. Give {task.remedy}, or start from "
                f"another model (--init)."
            )
        if unlike:
            raise ConfigError(f"model.input must be as the data is, but has {', '.join(unlike)}. Change one of them.")
        return
    source = "embedding.source_max_length" if model.embedding.source_max_length is not None else "max_length"
    for name, field, limit in (("source", source, model.longest_source), ("tokens", "max_length", model.max_length)):
        if limit is not None and name in batch and batch[name].shape[1] > limit:
            raise ConfigError(
                f"model.{field} ({limit}) is below the longest sequence of the data ({batch[name].shape[1]} tokens): "
                f"there is no learned position for its end. Raise it, or lower {task.lengths}."
            )
