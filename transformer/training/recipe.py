"""A recipe: everything that decides a run, as one frozen tree of dataclasses. `configs/*.py` return one."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn

from transformer.config import ConfigError, Execution, TransformerConfig, check_choice
from transformer.data.configs import PLACES, DataConfig
from transformer.lora import LoRA
from transformer.models import CausalLM, Classifier, Seq2Seq
from transformer.sharding import ParallelConfig
from transformer.training.serial import decode, encode, flatten

FORMAT = "transformer recipe"
VERSION = 1
"""of recipe.json; another one is not read"""
FILE = "recipe.json"

MODELS: dict[str, type[nn.Module]] = {"seq2seq": Seq2Seq, "causal_lm": CausalLM, "classifier": Classifier}
"""The model that each task of the data trains."""

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "rsqrt", "noam", "constant"]
NanPolicy = Literal["stop", "skip"]
ProgressMode = Literal["auto", "bar", "lines", "none"]

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
    "data.eval_batch_size",
    "origin.source",
    *sorted(f"data.{field}" for field in PLACES),
)
"""Fields, or groups of them, that may differ when a run goes on. All others shape its result: they must match."""


def _check_whole(group: str, config: object, least: int, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].type.endswith("None"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{group}.{field} must be a whole number of at least {least}, got {value!r}.")


def _check_number(group: str, config: object, low: float, high: float, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].type.endswith("None"):
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high:
            limits = f"at least {low:g}" + ("" if high == float("inf") else f" and below {high:g}")
            raise ConfigError(f"{group}.{field} must be a number of {limits}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters follow their gradients.

    Raises:
        ConfigError: an unknown name, a number out of range, or a schedule that needs a warm-up without one.
    """

    name: OptimizerName = "adamw"
    """adamw, or muon (orthogonalized momentum) for the matrices of the layers and adamw for the rest"""
    learning_rate: float = 1e-3
    """highest rate, reached at the end of the warm-up; noam: the factor before d_model^-0.5 (the paper has 1)"""
    schedule: ScheduleName = "cosine"
    """after the warm-up: cosine (down to final_fraction), rsqrt (1/sqrt(step)), noam (the paper's), constant"""
    warmup_steps: int = 100
    """steps over which the rate rises linearly from 0"""
    decay_steps: int | None = None
    """step at which cosine reaches its end; None: training.steps"""
    final_fraction: float = 0.1
    """cosine ends at this share of learning_rate"""
    beta1: float = 0.9
    """adam: decay of the mean of gradients"""
    beta2: float = 0.99
    """adam: decay of the mean of their squares"""
    epsilon: float = 1e-8
    """adam: added to the root of the mean square"""
    momentum: float = 0.95
    """muon: decay of the momentum"""
    weight_decay: float = 0.01
    """decoupled, times the rate; never on norms, biases, position tables and sinks"""
    decay_embeddings: bool = False
    """weight decay on token embeddings, too"""
    clip_norm: float | None = 1.0
    """gradients longer than this (over all parameters) are scaled down to it; None: never"""

    def __post_init__(self):
        check_choice("optimizer.name", self.name, OptimizerName.__args__)
        check_choice("optimizer.schedule", self.schedule, ScheduleName.__args__)
        _check_number("optimizer", self, 0.0, float("inf"), "learning_rate", "weight_decay", "epsilon")
        _check_number("optimizer", self, 0.0, 1.0, "beta1", "beta2", "momentum")
        _check_number("optimizer", self, 0.0, 1.0 + 1e-9, "final_fraction")
        _check_whole("optimizer", self, 0, "warmup_steps")
        _check_whole("optimizer", self, 1, "decay_steps")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"optimizer.clip_norm must be above 0, got {self.clip_norm!r}. None leaves gradients as they are."
            )
        if self.schedule in ("rsqrt", "noam") and self.warmup_steps < 1:
            raise ConfigError(f"optimizer.warmup_steps must be at least 1 with schedule={self.schedule!r}, got 0.")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long and on what terms."""

    steps: int = 1000
    """updates in all; a finished run goes on when this is raised"""
    seed: int = 0
    """of initialization, dropout and the order of the data"""
    accumulation: int = 1
    """micro-batches that one update is computed in, one after the other, to save memory; must divide data.batch_size"""
    label_smoothing: float = 0.0
    """share of the target's probability that is spread over the vocabulary (training loss only)"""
    ema_decay: float | None = None
    """keep an exponential average of the parameters, used in evaluation and after training; None: don't"""
    nan_policy: NanPolicy = "stop"
    """at a loss or gradient that is not finite: stop with an error, or skip that update and count it"""

    def __post_init__(self):
        check_choice("training.nan_policy", self.nan_policy, NanPolicy.__args__)
        _check_whole("training", self, 1, "steps", "accumulation")
        _check_whole("training", self, 0, "seed")
        _check_number("training", self, 0.0, 1.0, "label_smoothing", "ema_decay")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is measured and shown while training, and at the end."""

    every: int | None = 200
    """steps between evaluations; None: only at the end"""
    batches: int | None = None
    """batches of held-out data in an evaluation; None: all"""
    samples: int = 3
    """texts written by the model at each evaluation"""
    sample_tokens: int = 200
    """length of such a text in tokens (running text; a translation ends by itself)"""
    temperature: float = 0.8
    """of sampling such a text (running text; translations are greedy); 0: always the likeliest token"""
    exact_match_examples: int = 1000
    """pairs never trained on that are translated at the end and compared word for word"""
    translations: int = 10
    """of these, how many the summary shows"""

    def __post_init__(self):
        _check_whole("evaluation", self, 1, "every", "batches", "sample_tokens")
        _check_whole("evaluation", self, 0, "samples", "exact_match_examples", "translations")
        _check_number("evaluation", self, 0.0, float("inf"), "temperature")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept to go on from."""

    every: int | None = None
    """steps between checkpoints; None: at each evaluation (and always at the end, and when stopped)"""
    keep_last: int = 2
    """newest checkpoints that stay"""
    keep_best: int = 1
    """checkpoints of lowest eval/loss that stay"""

    def __post_init__(self):
        _check_whole("checkpoint", self, 1, "every", "keep_last")
        _check_whole("checkpoint", self, 0, "keep_best")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is written down."""

    every: int = 10
    """steps between lines of metrics; each gives means over these steps"""
    tensorboard: bool = True
    """write event files for TensorBoard, too"""
    progress: ProgressMode = "auto"
    """a bar on a terminal and plain lines elsewhere (auto), or one of them always, or nothing"""

    def __post_init__(self):
        check_choice("logging.progress", self.progress, ProgressMode.__args__)
        _check_whole("logging", self, 1, "every")


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
        if self.data.batch_size % self.training.accumulation:
            raise ConfigError(
                f"data.batch_size ({self.data.batch_size}) must be a multiple of training.accumulation "
                f"({self.training.accumulation}): each micro-batch has as many rows. Change one of them."
            )
        length = getattr(self.data, "sequence_length", None)
        if self.model.max_length is not None and length is not None and length > self.model.max_length:
            raise ConfigError(
                f"data.sequence_length ({length}) must be at most model.max_length ({self.model.max_length}), the rows "
                f"of the learned position table. Change one of them."
            )

    @property
    def task(self) -> str:
        """seq2seq, causal_lm or classifier: what the data asks of the model."""
        return type(self.data).task


def build_model(recipe: Recipe) -> nn.Module:
    """The model of a recipe whose vocabulary is known.

    Raises:
        ConfigError: model.vocab_size is None (`with_vocabulary` fills it in from a tokenizer).
    """
    if recipe.model.vocab_size is None:
        raise ConfigError("model.vocab_size is not known yet. Give it, or train, which takes it from the tokenizer.")
    return MODELS[recipe.task](recipe.model, recipe.execution)


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
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: {workdir} is not the workdir of a run. Name one, such as runs/number_words."
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} is not valid JSON ({error}). Remove it to have the next training run write it anew."
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
