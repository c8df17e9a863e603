"""Workdirs: open one to start or resume a run, and load the trained model from one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.config._local_paths import local_path
from transformer.data._dataset import Dataset
from transformer.data._pipeline import prepare as prepare_data
from transformer.data.kinds import PLACES
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._kinds import load_tokenizer
from transformer.media._image_settings import save_image_processor
from transformer.training import _processes as processes
from transformer.training import lora
from transformer.training._completion import complete_recipe
from transformer.training._parallel import Placement
from transformer.training._recipe import FILE, Recipe, build_model, load_recipe, save_recipe, to_json
from transformer.training._start import Start, describe_start, initialize_from, origin_of, with_teacher
from transformer.training._state import TrainState, abstract_state, merged_params
from transformer.training.tasks._table import TASKS
from transformer.training.workdir._checkpoint import Checkpointer, CheckpointError, load_params
from transformer.training.workdir._journal import TrainStats
from transformer.training.workdir._provenance import (
    TOKENIZER,
    WorkdirError,
    check_recipe_of_command,
    check_unchanged,
    moved,
    newest_provenance,
    provenance,
    tokenizer_fingerprint,
)
from transformer.training.workdir._restart import AVERAGE, check_not_lost, has_checkpoints

__all__ = [
    *("Run", "WorkdirError", "begin", "checkpoint_data", "has_checkpoints", "is_average", "load_own_tokenizer"),
    *("load_reference", "load_run", "load_usable", "open_run", "record_run", "shared_facts"),
]


@dataclass(frozen=True)
class Run:
    """A trained model that is ready to use."""

    recipe: Recipe
    model: nn.Module
    params: PyTree
    """tree of parameters, without the outer "params" """
    tokenizer: Tokenizer | None
    """None if the model does not read tokens"""
    step: int
    """step of the checkpoint that contains the parameters"""
    fingerprint: str
    """fingerprint of the training data"""


def load_run(workdir: str | os.PathLike, step: Literal["best", "newest"] | int = "best") -> Run:
    """Load the trained model from a workdir.

    The parameters are their moving average if the run has one; LoRA updates are merged into the base.

    Args:
        workdir: workdir of a run, or of an average of checkpoints (which has a single checkpoint).
        step: step of the checkpoint, "newest", or "best": the lowest eval/loss, for a classifier the highest
            eval/accuracy. If there is no best checkpoint or it is damaged, the newest valid one is used, with a
            warning.

    Raises:
        FileNotFoundError: the workdir does not exist, or does not have the checkpoint.
        WorkdirError: the recipe or the tokenizer is not the one that the checkpoint was trained with.
        ValueError: the recipe, tokenizer or checkpoint can't be read; the message names it.
    """
    recipe = load_recipe(local_path(workdir, "workdir"))
    tokenizer = load_own_tokenizer(recipe, workdir)
    if step == "best" and is_average(workdir):
        step = "newest"
    try:
        params, found = load_usable(recipe, tokenizer, workdir, step)
    except CheckpointError as error:
        if step != "best":
            raise
        warnings.warn(f"{error} Using the newest valid checkpoint instead.", stacklevel=2)
        params, found = load_usable(recipe, tokenizer, workdir, "newest")
    return Run(recipe, build_model(recipe), params, tokenizer, found, provenance(workdir, found).data)


def load_own_tokenizer(recipe: Recipe, workdir: str | os.PathLike) -> Tokenizer | None:
    """Load the tokenizer of a run; None for a task without tokens. Raises the same errors as `load_tokenizer`."""
    return load_tokenizer(Path(workdir) / TOKENIZER) if TASKS[recipe.task].tokens else None


def load_usable(
    recipe: Recipe, tokenizer: Tokenizer | None, workdir: str | os.PathLike, step: Literal["best", "newest"] | int
) -> tuple[PyTree, int]:
    """Load the model's parameters from a checkpoint; return them and the step of the checkpoint.

    The parameters are their moving average if the run has one; LoRA updates are merged into the base. WorkdirError if
    the checkpoint was trained with a different recipe or tokenizer; also raises the errors of `load_params`.
    """
    params, found = load_params(workdir, step=step, names=("ema", "params"))
    _check_loaded(recipe, tokenizer, workdir, found)
    if recipe.lora is not None:
        params = merged_params(recipe, {"new": {}, **params}, _load_base(recipe, workdir, found))
    return params, found


def _check_loaded(recipe: Recipe, tokenizer: Tokenizer | None, workdir: str | os.PathLike, step: int) -> None:
    """Raise WorkdirError if recipe or tokenizer differ from those of a checkpoint in what the model computes."""
    # An older checkpoint may be from before a resumption with --allow-change.
    check_unchanged(provenance(workdir, step), recipe, tokenizer, workdir, resuming=False, allow_change=True)


def _load_base(recipe: Recipe, workdir: str | os.PathLike, step: int) -> PyTree:
    """Load the frozen parameters of a checkpoint."""
    base, _ = load_params(workdir, step=step, names="base")
    # A checkpoint returns quantized kernels as dicts.
    quantized = recipe.lora is not None and recipe.lora.base is not None
    return lora.nested_like(abstract_state(recipe).base, base) if quantized else base


def load_updates(
    workdir: str | os.PathLike, step: Literal["best", "newest"] | int = "best"
) -> tuple[Recipe, nn.Module, PyTree, PyTree]:
    """Load recipe and model of a run with LoRA, and its trained (or averaged) and its frozen parameters, not merged.

    ConfigError if the run has no LoRA; also raises the errors of `load_run`.
    """
    recipe = load_recipe(workdir)
    if recipe.lora is None:
        raise ConfigError(f"{workdir} was trained without lora, so it has no adapter. Export the whole model.")
    trained, found = load_params(workdir, step=step, names=("ema", "params"))
    _check_loaded(recipe, load_own_tokenizer(recipe, workdir), workdir, found)
    # Checkpoints omit empty trees.
    return recipe, build_model(recipe), {"new": {}, **trained}, _load_base(recipe, workdir, found)


def load_reference(recipe: Recipe, workdir: str | os.PathLike, step: int) -> PyTree:
    """Load the parameters of the reference model from a checkpoint; None for a task without one."""
    if not TASKS[recipe.task].keeps_reference(recipe):
        return None
    return _load_base(recipe, workdir, step)


def is_average(workdir: str | os.PathLike) -> bool:
    """Return whether a workdir contains an average of checkpoints, which can't be resumed."""
    return (Path(workdir) / AVERAGE).exists()


def open_run(
    recipe: Recipe,
    workdir: str | os.PathLike,
    say: Callable[[str], None],
    start: Start | None = None,
    restart: bool = False,
    teacher: Start | None = None,
    allow_change: bool = False,
) -> tuple[Recipe, Dataset]:
    """Prepare a new run, or a resumed run if the workdir has checkpoints. Writes no files.

    An existing run also records the model that it was initialized from. `restart` starts a new run, whatever the
    workdir contains. `say` prints the changes of a resumed run that are allowed. Returns the recipe, completed from its
    data and `start`, and the data.

    Raises:
        WorkdirError: the workdir has checkpoints of a different model, data, optimizer, start or seed (the message
            shows the differences), an average of checkpoints, or a run whose checkpoints are missing. Or `start` is
            missing for a run without checkpoints, or with `restart`, that was initialized from a model.
        ConfigError: LoRA without a model to update, a model that lacks the recipe's parameters, preferences without a
            model to compare with, or a teacher that is missing or has another tokenizer.
        ValueError: the data can't be read, or doesn't fit the model.
    """
    workdir = local_path(workdir, "workdir")
    resumes = has_checkpoints(workdir) and not restart
    if not restart:
        _check_resumable(workdir)
    old, tokenizer = None, None if start is None else start.tokenizer
    if resumes:
        if (workdir / TOKENIZER).exists():
            tokenizer = load_tokenizer(workdir / TOKENIZER)
        old = _recorded(workdir, tokenizer, allow_change)
    elif start is None:
        _check_origin_given(workdir, restart)
    known = {"start": start, "old": old, "teacher": teacher}
    recipe = complete_recipe(recipe, **known)
    if old is not None:  # check now, before the data is tokenized, which may take long
        for change in check_recipe_of_command(old, recipe, workdir, allow_change):
            say(f"changed since the previous training run: {change}")
    if not resumes:
        tokenizer = _shared_tokenizer(tokenizer, teacher, start)
    with _data_of_run(workdir) if resumes else contextlib.nullcontext():
        dataset = prepare_data(recipe.data, tokenizer=tokenizer)
    return complete_recipe(recipe, data=dataset, **known), dataset


def _recorded(workdir: Path, tokenizer: Tokenizer | None, allow_change: bool) -> Recipe | None:
    """Return the recipe of a run: recipe.json, which must be as in the newest checkpoint or, if removed, that one's."""
    trained = newest_provenance(workdir)
    if not (workdir / FILE).exists():
        return None if trained is None else trained.recipe
    old = load_recipe(workdir)
    if trained is not None:
        check_unchanged(trained, old, tokenizer, workdir, resuming=False, allow_change=allow_change)
    return old


def _shared_tokenizer(tokenizer: Tokenizer | None, teacher: Start | None, start: Start | None) -> Tokenizer | None:
    """Return the tokenizer of the teacher, if there is one, or else that of the student; ConfigError if they differ."""
    if teacher is None:
        return tokenizer
    if teacher.tokenizer is None:
        raise ConfigError(
            f"the teacher {teacher.source} has no tokenizer, so its tokens can't be compared with those of the "
            f"model. Add its tokenizer.json to the directory."
        )
    if tokenizer is not None and tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(teacher.tokenizer):
        raise ConfigError(
            f"the teacher {teacher.source} has a different tokenizer from {start.source}: expected the same tokens, "
            f"got vocabularies of {teacher.tokenizer.vocab_size} and {tokenizer.vocab_size}. Choose a teacher with the "
            f"tokenizer of the model."
        )
    return teacher.tokenizer


def _check_resumable(workdir: Path) -> None:
    """Raise WorkdirError if the workdir contains an average of checkpoints, or a run whose checkpoints are missing."""
    if is_average(workdir):
        raise WorkdirError(
            f"{workdir} contains an average of checkpoints, which can't be resumed because it has no optimizer state. "
            f"Pass another --workdir; add --init {workdir} to start from these parameters."
        )
    check_not_lost(workdir)


def _check_origin_given(workdir: Path, restart: bool) -> None:
    """Raise WorkdirError if the run was initialized from a model, which must then be given again."""
    source = origin_of(workdir)
    if source is None:
        return
    if restart:
        raise WorkdirError(
            f"the run in {workdir} was initialized from {source}. To restart it, pass --init {source} (or another "
            f"model) together with --restart. To start from random parameters, pass another --workdir."
        )
    raise WorkdirError(
        f"the run in {workdir} has no checkpoint yet, and its recipe says that it is initialized from {source}. Pass "
        f"--init {source} again."
    )


@contextlib.contextmanager
def _data_of_run(workdir: Path) -> Iterator[None]:
    """Convert errors of the content of the data to a WorkdirError: a resumed run has its tokenizer and labels."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise WorkdirError(
            f"the data does not fit the run in {workdir}, which keeps the tokenizer and the labels of its first start: "
            f"{error} If the data has changed since then, for example because text was appended to a file, restore it, "
            f"or pass another --workdir."
        ) from error


def record_run(recipe: Recipe, dataset: Dataset, workdir: str | os.PathLike) -> None:
    """Write recipe.json, the tokenizer and the preprocessing of images, which a model needs besides its checkpoints."""
    if dataset.tokenizer is not None:
        dataset.tokenizer.save_alone(Path(workdir) / TOKENIZER)
    if dataset.processor is not None:
        save_image_processor(dataset.processor, workdir)
    save_recipe(recipe, workdir)


def begin(
    recipe: Recipe,
    dataset: Dataset,
    workdir: str | os.PathLike,
    checkpoints: Checkpointer,
    batches: Any,
    placement: Placement,
    start: Start | None = None,
    teacher: Start | None = None,
    allow_change: bool = False,
) -> tuple[TrainState, TrainStats]:
    """Restore the newest valid checkpoint, or create a new state from `start` and `teacher` if there is no checkpoint.

    `batches` is set to its position in the checkpoint. CheckpointError if there are checkpoints, but none is valid and
    fits; WorkdirError if the checkpoint belongs to a different recipe or to different data.
    """
    if not processes.first_decides(lambda: has_checkpoints(workdir)):
        state = placement.new_state()
        if teacher is not None:
            print(f"teacher: {teacher.source} ({teacher.model})")
            state = with_teacher(teacher, state)
        if start is None:
            return state, TrainStats()
        print(describe_start(recipe, start))
        return initialize_from(start, state), TrainStats()
    restored = checkpoints.restore_newest(placement.abstract_state())
    trained = provenance(workdir, restored.step)
    check_unchanged(trained, recipe, dataset.tokenizer, workdir, resuming=True, allow_change=allow_change)
    if restored.data["fingerprint"] != dataset.fingerprint:
        raise WorkdirError(
            f"the data has changed since {workdir} was trained on it (fingerprint {restored.data['fingerprint'][:12]}, "
            f"now {dataset.fingerprint[:12]}): resuming would mix two data sets. Restore the old data, or pass "
            f"another --workdir."
        )
    batches.set_state(moved(restored.data["batches"], trained.recipe, recipe))
    return restored.state, TrainStats(**restored.data["ledger"])


def checkpoint_data(dataset: Dataset, batches: Any, ledger: TrainStats) -> dict[str, Any]:
    """Return the data that a checkpoint contains in addition to the state, for `begin`."""
    return {
        "batches": batches.get_state(),
        "ledger": dataclasses.asdict(ledger),
        "fingerprint": dataset.fingerprint,
        "tokenizer": tokenizer_fingerprint(dataset.tokenizer),
    }


def shared_facts(recipe: Recipe) -> str:
    """Return, as JSON, what must be equal in all processes of a run: not their own settings, nor places of files."""
    values = to_json(recipe)["recipe"]
    for field in ("coordinator", "num_processes", "process_id", "patience"):
        del values["parallel"][field]
    for field in PLACES:
        values["data"].pop(field, None)
    if values["origin"] is not None:
        del values["origin"]["source"]
    if values["distill"] is not None:
        del values["distill"]["teacher"]
    return json.dumps(values, sort_keys=True)
