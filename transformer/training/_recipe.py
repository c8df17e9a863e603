"""A recipe: everything that decides a run, as one frozen tree of dataclasses. `configs/*.py` return one."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn

from transformer.config._checks import ConfigError
from transformer.config._model import Execution, TransformerConfig
from transformer.config._untrusted import parse_json, read_bounded
from transformer.data._config import shared_rows
from transformer.data.kinds import PLACES, DataConfig
from transformer.nn._sharding import ParallelConfig
from transformer.training._serial import decode, encode, flatten
from transformer.training._settings import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
)
from transformer.training._tasks import TASKS
from transformer.training.lora import LoRA

FORMAT = "transformer recipe"
VERSION = 1
"""of recipe.json; another one is not read"""
FILE = "recipe.json"

LARGEST = 2**31 - 1
"""largest integer of a recipe: steps, sizes and counts become int32"""
LARGEST_SEED = 2**32 - 1
"""largest `training.seed`: JAX and Grain take 32 bits, and JAX would drop the others without a word"""

MAY_CHANGE = (
    "name",
    "execution",
    "parallel",
    "evaluation",
    "checkpoint",
    "logging",
    "training.steps",
    "training.accumulation",
    "training.nan_policy",
    "training.spike_policy",
    "training.spike_deviations",
    "data.eval_batch_size",
    "origin.source",
    *sorted(f"data.{field}" for field in PLACES),
)
"""Fields, or groups of them, that may differ when a run goes on. All others shape its result: they must match."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a run's first parameters came from. Training fills it in; no recipe gives it."""

    source: str
    """directory or name that was given; it may have moved since"""
    model: str
    """what was there"""
    fingerprint: str
    """SHA-256 of the parameters that were taken"""
    new: tuple[str, ...] = ()
    """paths of the parameters that were not there: they were initialized, and are trained whole"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run.

    Raises:
        ConfigError: fields that don't fit each other; the message says what to change.
    """

    name: str
    """what the run is called; the default workdir is runs/<name>"""
    model: TransformerConfig
    """what the model is"""
    data: DataConfig
    """what it learns from"""
    execution: Execution = Execution()
    """how it is computed"""
    parallel: ParallelConfig = ParallelConfig()
    """over which devices"""
    optimizer: OptimizerConfig = OptimizerConfig()
    """how parameters follow their gradients"""
    training: TrainingConfig = TrainingConfig()
    """how long and on what terms"""
    evaluation: EvaluationConfig = EvaluationConfig()
    """what is measured and shown"""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """what is kept to go on from"""
    logging: LoggingConfig = LoggingConfig()
    """what is written down"""
    lora: LoRA | None = None
    """train low-rank updates of a pretrained model instead of all of it; any --lora option turns it on"""
    origin: Origin | None = None
    """where the first parameters came from; train.py fills it in for --init"""

    def __post_init__(self):
        if not self.name or self.name != os.path.basename(self.name):
            raise ConfigError(f"name must be a plain name, as it becomes a directory under runs/, got {self.name!r}.")
        self._check_limits()
        field, rows = shared_rows(self.data)
        if rows % self.training.accumulation:
            raise ConfigError(
                f"data.{field} ({rows}) must be a multiple of training.accumulation "
                f"({self.training.accumulation}): each micro-batch has as many rows. Change one of them."
            )
        if self.lora is not None and self.optimizer.name == "muon":
            raise ConfigError(
                "optimizer.name muon is for whole matrices, and lora trains the two factors of each. Take adamw, or "
                "leave lora out."
            )
        TASKS[self.task].check(self.training)
        for field in ("sequence_length", "packed_length"):
            length = getattr(self.data, field, None)
            if self.model.max_length is not None and length is not None and length > self.model.max_length:
                raise ConfigError(
                    f"data.{field} ({length}) must be at most model.max_length ({self.model.max_length}), the rows of "
                    f"the learned position table. Change one of them."
                )
        by_tokens = getattr(self.data, "batch_tokens", None) is not None
        if self.parallel.context != 1 and by_tokens and self.data.packed_length is None:
            raise ConfigError(
                f"parallel.context ({self.parallel.context}) splits rows of one length, but data.batch_tokens makes "
                f"batches as long as their pairs. Leave it out, or give data.packed_length, a multiple of it."
            )

    def _check_limits(self) -> None:
        """Raises ConfigError for an integer that does not fit its type, and for a path that is empty."""
        for field, value in flatten(self).items():
            most = LARGEST_SEED if field == "training.seed" else LARGEST
            if isinstance(value, int) and abs(value) > most:
                raise ConfigError(f"{field} must be at most {most}, got {value}.")
        for field in sorted(PLACES):
            if getattr(self.data, field, None) == "":
                raise ConfigError(f"data.{field} must name a file or a folder, got ''. Leave it out, or give a path.")

    @property
    def task(self) -> str:
        """What the data asks of the model: one of `tasks.TASKS`."""
        return type(self.data).task


def build_model(recipe: Recipe) -> nn.Module:
    """The model of a recipe whose vocabulary is known.

    Raises:
        ConfigError: model.vocab_size is None (`with_vocabulary` fills it in from a tokenizer).
    """
    task = TASKS[recipe.task]
    if task.tokens and recipe.model.vocab_size is None:
        raise ConfigError("model.vocab_size is not known yet. Give it, or train, which takes it from the tokenizer.")
    return task.model(recipe.model, recipe.execution)


def with_vocabulary(recipe: Recipe, vocab_size: int) -> Recipe:
    """The recipe with model.vocab_size filled in from the tokenizer; a size given by hand must be large enough.

    Raises:
        ConfigError: a model.vocab_size below the tokenizer's.
    """
    given = recipe.model.vocab_size
    if given is None:
        return dataclasses.replace(recipe, model=recipe.model.replace(vocab_size=vocab_size))
    if given < vocab_size:
        raise ConfigError(
            f"model.vocab_size ({given}) is below the {vocab_size} tokens of the tokenizer. Leave it out: it is "
            f"filled in."
        )
    return recipe


def with_labels(recipe: Recipe, labels: tuple[str, ...]) -> Recipe:
    """The recipe with data.labels and model.num_classes filled in from the labels of the data.

    Raises:
        ConfigError: a model.num_classes that is not their number.
    """
    given = recipe.model.num_classes
    if given not in (None, len(labels)):
        raise ConfigError(
            f"model.num_classes is {given}, but the data has {len(labels)} labels ({', '.join(labels)}). Leave it out: "
            f"it is filled in."
        )
    model = recipe.model.replace(num_classes=len(labels))
    return dataclasses.replace(recipe, model=model, data=dataclasses.replace(recipe.data, labels=labels))


def to_json(recipe: Recipe) -> dict[str, Any]:
    """JSON values that `from_json` makes the same recipe of."""
    return {"format": FORMAT, "version": VERSION, "recipe": encode(recipe)}


def from_json(values: Any, where: str = "recipe") -> Recipe:
    """The recipe of `to_json`; `where` names the file in errors.

    Raises:
        ConfigError: not a recipe, of another version, or with unknown, missing or mistyped fields.
    """
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(f'{where} is not a recipe: it lacks "format": {FORMAT!r}.')
    if values.get("version") != VERSION:
        raise ConfigError(
            f"{where} is of recipe version {values.get('version')!r}, this program reads {VERSION}. "
            f"Use the version that wrote it."
        )
    return decode(Recipe, values.get("recipe"), where)


def save_recipe(recipe: Recipe, workdir: str | os.PathLike) -> Path:
    """Writes `workdir/recipe.json`, whole or not at all; gives its path."""
    path = Path(workdir) / FILE
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(to_json(recipe), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def load_recipe(workdir: str | os.PathLike) -> Recipe:
    """The recipe a workdir was trained with.

    Raises:
        FileNotFoundError: no such workdir, or one without a recipe.
        ConfigError: a recipe.json that can't be read.
    """
    path = Path(workdir) / FILE
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"{path} does not exist: {workdir} is not the workdir of a run. Name one, such as runs/number_words."
        )
    try:
        values = parse_json(read_bounded(Path(workdir), FILE))
    except ValueError as error:
        raise ConfigError(
            f"{path} is not what a run wrote ({error}). Remove it to have the next training run write it anew."
        ) from error
    return from_json(values, str(path))


@dataclass(frozen=True)
class Change:
    """One field that differs between two recipes, its dotted name with the `old` and the `new` value."""

    field: str
    old: Any
    new: Any

    def __str__(self):
        return f"{self.field}: {self.old!r} -> {self.new!r}"


def difference(old: Recipe, new: Recipe) -> tuple[list[Change], list[Change]]:
    """What differs: first the fields that must match to go on with a run, then those that may change."""
    before, after = flatten(old), flatten(new)
    if type(old.data) is not type(new.data):
        before["data"], after["data"] = type(old.data).kind, type(new.data).kind
    must_match, may_change = [], []
    for field in dict.fromkeys([*before, *after]):
        if before.get(field) != after.get(field) or (field in before) != (field in after):
            change = Change(field, before.get(field), after.get(field))
            free = any(field == name or field.startswith(f"{name}.") for name in MAY_CHANGE)
            (may_change if free else must_match).append(change)
    return must_match, may_change
