"""A recipe: the full config of a run, a frozen tree of dataclasses. Each file in `configs/` returns one."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn

from transformer.config._checks import ConfigError
from transformer.config._execution import Execution
from transformer.config._local_paths import local_path
from transformer.config._model import TransformerConfig
from transformer.config._recipe_files import SAVED_RECIPE
from transformer.config._replaced_files import replace_file
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
from transformer.training.lora import LoRA
from transformer.training.tasks._distillation import Distill
from transformer.training.tasks._policy_gradient import GRPO
from transformer.training.tasks._preference import DPO
from transformer.training.tasks._table import TASKS

FORMAT = "transformer recipe"
VERSION = 1
"""version of recipe.json; other versions are rejected"""
FILE = SAVED_RECIPE

LARGEST = 2**31 - 1
"""largest integer in a recipe: steps, sizes and counts become int32"""
LARGEST_SEED = 2**32 - 1
"""largest `training.seed`: JAX and Grain take 32 bits, and JAX would silently drop the higher ones"""

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
    "distill.teacher",
    "grpo.reward_model",
    *sorted(f"data.{field}" for field in PLACES),
)
"""Fields, or groups of fields, that may change when a run is resumed. All others affect its result and must match."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Source of a run's initial parameters. Training fills it in; recipes leave it empty."""

    source: str
    """directory or name passed to --init; it may have moved since"""
    model: str
    """kind of model in that source"""
    fingerprint: str
    """SHA-256 of the loaded parameters"""
    new: tuple[str, ...] = ()
    """paths of parameters that the source lacks: they are initialized randomly and trained in full"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The full config of a run.

    Raises:
        ConfigError: fields contradict each other; the message names the field to change.
    """

    name: str
    """name of the run; the default workdir is runs/<name>"""
    model: TransformerConfig
    """model config: sizes and architecture"""
    data: DataConfig
    """training data and tokenizer"""
    execution: Execution = Execution()
    """execution options: attention kernel, scan over layers, rematerialization; they don't change the result"""
    parallel: ParallelConfig = ParallelConfig()
    """devices, mesh and sharding"""
    optimizer: OptimizerConfig = OptimizerConfig()
    """optimizer and learning-rate schedule"""
    training: TrainingConfig = TrainingConfig()
    """number of steps, seed, loss and safeguards"""
    evaluation: EvaluationConfig = EvaluationConfig()
    """evaluation on held-out data, samples and translations"""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """how often to save checkpoints, and which to keep"""
    logging: LoggingConfig = LoggingConfig()
    """metrics and progress display"""
    lora: LoRA | None = None
    """LoRA: train low-rank updates of a pretrained model instead of all parameters; any --lora option turns it on"""
    dpo: DPO | None = None
    """loss of preferences (data kind preferences); None: the defaults"""
    grpo: GRPO | None = None
    """rewards and rollouts (data kind prompts)"""
    distill: Distill | None = None
    """distillation: learn the predictions of a teacher too; any --distill option turns it on"""
    origin: Origin | None = None
    """source of the initial parameters; set by --init"""

    def __post_init__(self):
        if not self.name or self.name != os.path.basename(self.name):
            raise ConfigError(
                f"name must be a plain name, because it becomes a directory under runs/, got {self.name!r}. Use "
                f"letters, digits, '-' and '_'."
            )
        self._check_limits()
        field, rows = shared_rows(self.data)
        if rows % self.training.accumulation:
            raise ConfigError(
                f"data.{field} ({rows}) must be a multiple of training.accumulation "
                f"({self.training.accumulation}): all micro-batches have the same number of rows. Change one of them."
            )
        self._check_optimizer()
        TASKS[self.task].check_recipe(self)
        self._check_objective()
        for field in ("sequence_length", "packed_length"):
            length = getattr(self.data, field, None)
            if self.model.max_length is not None and length is not None and length > self.model.max_length:
                raise ConfigError(
                    f"data.{field} ({length}) must be at most model.position.max_length ({self.model.max_length}), the "
                    f"size of the learned position table. Change one of the two."
                )
        by_tokens = getattr(self.data, "batch_tokens", None) is not None
        if self.parallel.context != 1 and by_tokens and self.data.packed_length is None:
            raise ConfigError(
                f"parallel.context ({self.parallel.context}) needs rows of a fixed length, but data.batch_tokens makes "
                f"batches of different lengths. Remove it, or set data.packed_length to a multiple of it."
            )

    def _check_optimizer(self) -> None:
        """Raise ConfigError for an optimizer that other options of the recipe exclude."""
        name = self.optimizer.name
        if self.lora is not None and name == "muon":
            raise ConfigError(
                "optimizer.name muon needs whole weight matrices, but lora trains two factors of each matrix. Use "
                "adamw, or remove lora."
            )
        if name == "schedule_free_adamw" and self.training.ema_decay is not None:
            raise ConfigError(
                "optimizer.name schedule_free_adamw averages the parameters itself. Remove training.ema_decay, or use "
                "another optimizer."
            )
        if name == "sophia" and (self.parallel.kind == "pmap" or self.execution.attention != "reference"):
            raise ConfigError(
                f"optimizer.name sophia differentiates the loss twice, which needs execution.attention reference and "
                f"parallel.kind mesh; got {self.execution.attention} and {self.parallel.kind}. Pass "
                f"--execution.attention reference, or use another optimizer."
            )

    def _check_objective(self) -> None:
        """Raise ConfigError for options of a loss that the task does not have, or that distillation excludes."""
        task, kind = TASKS[self.task], type(self.data).kind
        for field, source, data in (("dpo", "preferences", "preferences"), ("grpo", "rewards", "prompts")):
            options = getattr(self, field)
            if options is not None and task.options(self) is not options:
                raise ConfigError(
                    f"{field} has the options of learning from {source}, but the data is of kind {kind} (task "
                    f"{task.name}). Remove {field}, or use data of kind {data}."
                )
        if self.distill is not None and (self.training.label_smoothing or self.training.z_loss):
            raise ConfigError(
                "training.label_smoothing and training.z_loss can't be combined with distill: the teacher's "
                "distribution replaces the targets. Leave them at 0."
            )

    def _check_limits(self) -> None:
        """Raise ConfigError for an integer that does not fit its type, and for an empty path."""
        for field, value in flatten(self).items():
            most = LARGEST_SEED if field == "training.seed" else LARGEST
            if isinstance(value, int) and abs(value) > most:
                raise ConfigError(f"{field} must be at most {most}, got {value}.")
        for field in sorted(PLACES):
            if getattr(self.data, field, None) == "":
                raise ConfigError(f"data.{field} must name a file or a folder, got ''. Remove it, or pass a path.")

    @property
    def task(self) -> str:
        """The training task that the data defines: one of `tasks.TASKS`."""
        return type(self.data).task


def build_model(recipe: Recipe, execution: Execution | None = None) -> nn.Module:
    """Build the model of a recipe whose vocabulary size is known; `execution` replaces that of the recipe.

    Raises:
        ConfigError: model.vocab_size is None (`with_vocabulary` fills it in from a tokenizer).
    """
    task = TASKS[recipe.task]
    if task.tokens and recipe.model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set. Set it, or train: training sets it from the tokenizer.")
    return task.model(recipe.model, recipe.execution if execution is None else execution)


def build_teacher(recipe: Recipe) -> nn.Module:
    """Build the model of a recipe's teacher, with the execution options of the student; ConfigError if it is not
    loaded.
    """
    if recipe.distill.model is None:
        raise ConfigError(
            "the recipe has a teacher (distill.teacher), but its model was not loaded. Pass train(..., teacher="
            "start_from(recipe.distill.teacher, recipe)), or use the command line, which loads it."
        )
    return TASKS[recipe.task].model(recipe.distill.model, recipe.execution)


def with_vocabulary(recipe: Recipe, vocab_size: int) -> Recipe:
    """Set model.vocab_size from the tokenizer; a size in the recipe must be large enough.

    Raises:
        ConfigError: model.vocab_size is smaller than the tokenizer's.
    """
    given = recipe.model.vocab_size
    if given is None:
        return dataclasses.replace(recipe, model=recipe.model.replace(vocab_size=vocab_size))
    if given < vocab_size:
        raise ConfigError(
            f"model.vocab_size ({given}) must be at least {vocab_size}, the number of tokens of the tokenizer. Remove "
            f"it: training sets it."
        )
    return recipe


def to_json(recipe: Recipe) -> dict[str, Any]:
    """Convert a recipe to JSON values; `from_json` is the inverse."""
    return {"format": FORMAT, "version": VERSION, "recipe": encode(recipe)}


def from_json(values: Any, where: str = "recipe") -> Recipe:
    """Convert the values of `to_json` to a recipe; `where` names the file in errors.

    Raises:
        ConfigError: the values are not a recipe, have another version, or have unknown, missing or mistyped fields.
    """
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(f'{where} is not a recipe: it lacks "format": {FORMAT!r}.')
    if values.get("version") != VERSION:
        raise ConfigError(
            f"{where} has recipe version {values.get('version')!r}, but this program reads version {VERSION}. "
            f"Use the version of this program that wrote the file."
        )
    return decode(Recipe, values.get("recipe"), where)


def save_recipe(recipe: Recipe, workdir: str | os.PathLike) -> Path:
    """Write `workdir/recipe.json` atomically and return its path."""
    return replace_file(Path(workdir) / FILE, json.dumps(to_json(recipe), indent=2) + "\n")


def load_recipe(workdir: str | os.PathLike) -> Recipe:
    """Load the recipe of a workdir.

    Raises:
        FileNotFoundError: the workdir does not exist, or has no recipe.
        ConfigError: recipe.json can't be read.
    """
    path = local_path(workdir, "workdir") / FILE
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"{path} does not exist: {workdir} is not the workdir of a run. Pass one, such as runs/number_words."
        )
    try:
        values = parse_json(read_bounded(Path(workdir), FILE))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}). Remove it: the next training run writes it again.") from error
    return from_json(values, str(path))


@dataclass(frozen=True)
class Change:
    """A field that differs between two recipes: its dotted name, the `old` and the `new` value."""

    field: str
    old: Any
    new: Any
    effect: str = ""
    """what the change does, if that is not obvious"""

    def __str__(self):
        return f"{self.field}: {self.old!r} -> {self.new!r}" + (f" ({self.effect})" if self.effect else "")


def difference(old: Recipe, new: Recipe) -> tuple[list[Change], list[Change]]:
    """Return the fields that differ: those that must match to resume a run, and those that may change."""
    before, after = flatten(old), flatten(new)
    if type(old.data) is not type(new.data):
        before["data"], after["data"] = type(old.data).kind, type(new.data).kind
    schemes = [type(recipe.model.position).__name__ for recipe in (old, new)]
    if len(set(schemes)) == 2:
        before, after = ({"model.position": one} | flat for one, flat in zip(schemes, (before, after), strict=True))
    must_match, may_change = [], []
    for field in dict.fromkeys([*before, *after]):
        if before.get(field) != after.get(field) or (field in before) != (field in after):
            change = Change(field, before.get(field), after.get(field))
            free = any(field == name or field.startswith(f"{name}.") for name in MAY_CHANGE)
            (may_change if free else must_match).append(change)
    return must_match, may_change
