"""The base class of training tasks, with everything that differs between tasks."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.config._execution import Execution
from transformer.config._model import TransformerConfig
from transformer.config._paths import get_path
from transformer.data._dataset import DataKind, Dataset
from transformer.nn._axes import Array, Float
from transformer.nn._sharding import ParallelConfig
from transformer.training._settings import CheckpointConfig, EvaluationConfig, TrainingConfig
from transformer.training.tasks._chunked_loss import sum_in_chunks, tokens_at_once
from transformer.training.tasks._distillation import Distill
from transformer.training.tasks._evaluation import EvalLoss, Evaluation
from transformer.training.tasks._losses import Batch, Scalar, correct, cross_entropy
from transformer.training.tasks._policy_gradient import GRPO
from transformer.training.tasks._preference import DPO
from transformer.training.tasks._results import Results

Outputs: TypeAlias = Float[Array, "..."]
"""logits (B, T, V) or (B, C), or a forecast (B, horizon, channels)"""
Sums: TypeAlias = Mapping[str, Scalar]
"""weighted sums over targets, by name: `correct` (number of correct predictions) or `absolute_error`"""
Shapes: TypeAlias = Mapping[str, Any]
"""a batch: arrays or shapes (B, ...), by name"""

Options: TypeAlias = DPO | GRPO | None
"""options of a loss that compares the model with a reference model"""


class TaskRecipe(Protocol):
    """The parts of a `Recipe` that tasks read; its class imports the tasks."""

    model: TransformerConfig
    data: DataKind
    execution: Execution
    parallel: ParallelConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    dpo: DPO | None
    grpo: GRPO | None
    distill: Distill | None
    origin: Any


class Task(ABC):
    """Base class of tasks. The defaults are those of a model that reads tokens and computes logits."""

    name: ClassVar[str]
    """name of the task in data kinds and summary.json"""
    model: ClassVar[type[nn.Module]]
    """class of the model to train"""

    # The batch

    tokens: ClassVar[bool] = True
    """whether the model reads tokens, and so needs a tokenizer and a vocabulary; otherwise it reads `values`"""
    source: ClassVar[bool] = False
    """whether an encoder reads a source, from which a decoder generates the target"""
    lengths: ClassVar[str] = ""
    """fields of the data config that limit the length of its sequences"""

    @abstractmethod
    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model, by name, that follow from a batch (inputs, positions and masks)."""

    def forward(self, model: nn.Module, variables: PyTree, batch: Batch, **arguments: Any) -> PyTree:
        """Apply the model with its tree of variables to a batch. Returns the outputs, or the result of `method`."""
        return model.apply(variables, **self.inputs(model.config, batch), **arguments)

    @abstractmethod
    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes (B, ...) of a training batch of `rows` rows, by name; all lengths must be known."""

    def batch_shapes(self, recipe: TaskRecipe, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return `shapes` of the batch that a recipe trains on, for `rows` rows of its data."""
        return self.shapes(recipe.model, recipe.data, rows)

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        """Return number and length of the sequences in a batch (B, ...) that a stack of layers reads; for pairs, the
        targets.
        """
        return batch["tokens"].shape

    def layers(self, config: TransformerConfig) -> int:
        """Return the number of layers in all stacks of the model."""
        return config.num_layers

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        """Return how many tokens the matrix at this path multiplies; an embedding table only if it also computes the
        logits.
        """
        return tokens if path != "embedding/embedding" or config.embedding.tie else 0

    def context(self, config: TransformerConfig, data: DataKind) -> int | None:
        """Return the context length of a trained model in tokens; None if it is unlimited."""
        return config.max_length or getattr(data, "max_length", None)

    part: ClassVar[str] = ""
    """path of the part of the model config that describes the shape of the batch's `values`"""
    remedy: ClassVar[str] = "images of the model's size"
    """the data that fits a model, for error messages"""

    def sizes(self, batch: Batch) -> dict[str, int]:
        """Return the sizes of a batch (B, ...), here of images, by the field of `part` that must have the same size."""
        shape = batch["values"].shape[1:] if self.part else ()
        return dict(zip(("image_height", "image_width", "channels"), shape, strict=bool(shape)))

    def check_data(self, recipe: TaskRecipe, batch: Batch) -> None:
        """Raise ConfigError if a batch does not fit the model's shapes, or its sequences are too long for the model."""
        model = recipe.model
        sizes = {field: (getattr(get_path(model, self.part), field), new) for field, new in self.sizes(batch).items()}
        unequal = [f"{field} {old} (data: {new})" for field, (old, new) in sizes.items() if old != new]
        if unequal and recipe.origin is not None:
            raise ConfigError(
                f"the model of {recipe.origin.source} does not fit the data: it has {', '.join(unequal)}. Use "
                f"{self.remedy}, or start from another model (--init)."
            )
        if unequal:
            raise ConfigError(
                f"model.input must match the data, but has {', '.join(unequal)}. Change the model or the data."
            )
        source = "max_length" if model.longest_source == model.max_length else "source_max_length"
        limits = ("source", source, model.longest_source), ("tokens", "max_length", model.max_length)
        for name, field, limit in limits:
            if limit is not None and name in batch and batch[name].shape[-1] > limit:
                raise ConfigError(
                    f"model.position.{field} ({limit}) must be at least the longest sequence of the data "
                    f"({batch[name].shape[-1]} tokens), because each position has a learned embedding. Raise it, or "
                    f"lower {self.lengths}."
                )

    def check_recipe(self, recipe: TaskRecipe) -> None:
        """Raise ConfigError for a loss, a model or a layout on devices that this task can't use."""
        self.check(recipe.training)
        if recipe.distill is not None and not self.each_token:
            raise ConfigError(
                f"distill needs a target for every token, and the task {self.name} has none. Remove distill, or use "
                f"running text, conversations or pairs of texts."
            )

    def decided_by_data(self, recipe: TaskRecipe, dataset: Dataset) -> TaskRecipe:
        """Return the recipe with fields of its model that the data decides for this task; ConfigError if they differ
        already.
        """
        return recipe

    def kept_from(self, recipe: TaskRecipe, old: TaskRecipe) -> TaskRecipe:
        """Return a recipe that resumes the run `old`, with the fields that `decided_by_data` had set in its model."""
        return recipe

    # The loss

    each_token: ClassVar[bool] = False
    """whether every token has logits, so that `loss` and `measures` may be computed for some tokens at a time"""

    def check(self, training: TrainingConfig) -> None:
        """Raise ConfigError for an option of the loss that this task does not support."""
        if training.loss_tokens is not None and not self.each_token:
            raise ConfigError(
                f"training.loss_tokens is for tasks with a target for every token, and the task {self.name} has none. "
                f"Leave it at None."
            )

    def loss(self, outputs: Outputs, batch: Batch, training: TrainingConfig | None) -> tuple[Scalar, Scalar]:
        """Compute the sum of the loss over all targets, in `unit`, and of their weights; for evaluation without
        `training`.
        """
        extras = {} if training is None else {"label_smoothing": training.label_smoothing, "z_loss": training.z_loss}
        return cross_entropy(outputs, batch["targets"], batch["weights"], **extras)

    def limited(self, config: TransformerConfig, params: PyTree) -> PyTree:
        """Return the trained parameters after an update, with those that have limits inside them."""
        return params

    # The reference model

    def means(self, recipe: TaskRecipe) -> Mapping[str, tuple[str, str]]:
        """Return the sums of `compared` that training reports as means: their names in the metrics, and divisors."""
        return {}

    def keeps_reference(self, recipe: TaskRecipe) -> bool:
        """Return whether the state contains the parameters of a reference model."""
        return False

    def options(self, recipe: TaskRecipe) -> Options:
        """Return the part of a recipe with the options of this task; None for a loss without a reference model."""
        return None

    # The evaluation

    outputs: ClassVar[str] = "logits"
    """name of the outputs"""

    def measures(self, outputs: Outputs, batch: Batch) -> Sums:
        """Compute the sums that evaluation reports in addition to the loss; `outputs` as in `loss`."""
        return {"correct": correct(outputs, batch["targets"], batch["weights"])}

    def sums(self, model: nn.Module, params: PyTree, batch: Batch, reference: PyTree, options: Options) -> Sums:
        """Compute sums over a batch, without dropout: `loss_sum` (without label smoothing, z-loss and router loss),
        `weight`, and the measures. `reference` has the parameters of the reference model, for a task that needs them.
        """
        variables, method = {"params": params}, type(model).with_aux
        return self._reported(self.forward(model, variables, batch, deterministic=True, method=method)[0], batch)

    def _reported(self, outputs: Outputs, batch: Batch) -> Sums:
        loss_sum, weight = self.loss(outputs, batch, None)
        return {"loss_sum": loss_sum, "weight": weight, **self.measures(outputs, batch)}

    def measure(self, run: Evaluation, split: str = "validation", limit: int | None = None) -> EvalLoss | None:
        """Evaluate on at most `limit` batches of a split; None if `run.should_stop` ended it."""
        return run.mean_loss(split, limit, run.dataset.target_bytes(split, limit))

    def evaluate(self, run: Evaluation) -> tuple[EvalLoss | None, str]:
        """Evaluate during training: return the measures on the validation split (None after a signal), and samples."""
        result = self.measure(run, limit=run.options.batches)
        return result, "" if run.should_stop() or not run.options.samples else self.samples(run)

    def samples(self, run: Evaluation) -> str:
        """Return generated texts for the terminal and samples.txt; "" for a model that does not generate text."""
        return ""

    def metric(self, result: EvalLoss) -> float:
        """Return the value that decides which evaluation is the best; the lower, the better."""
        return result.loss

    def report(self, run: Evaluation, folder: Path) -> Results | None:
        """Evaluate on unseen data after training, with pictures in the workdir `folder`; None if `run.should_stop`
        ended it.
        """
        result = run.mean_loss(run.unseen)
        prompt = "" if self.try_it is None else first_words(run.dataset.prompts()[0], 60)
        return None if result is None else Results(split=run.unseen, held_out=result, prompt=prompt)

    # The report

    targets: ClassVar[str] = "target tokens"
    """name of the targets, which the weights count"""
    unit: ClassVar[str] = "nats per token"
    """unit of the loss"""
    writes: ClassVar[bool] = False
    """whether the model generates text, so that samples and translations are shown"""
    shown: ClassVar[str] = "translations of unseen examples"
    """heading of `Results.translations`"""
    best: ClassVar[str] = "lowest eval loss"
    """what distinguishes the evaluation with the lowest `metric`"""
    try_it: ClassVar[tuple[str, str] | None] = None
    """command and options that apply a trained model to a text or the path of an image, which follows them; None:
    `evaluate run`"""

    def eval_line(self, loss: float, best: float | None, step: int | None) -> str:
        """Describe the loss of the last evaluation and the best one of all, which was at `step`."""
        return f"eval loss: {loss:.4f}" + ("" if best is None else f", best {best:.4f} at step {step}")


class TokenTask(Task):
    """Base class of tasks with a target for every token."""

    each_token = True

    def sums(self, model: nn.Module, params: PyTree, batch: Batch, reference: PyTree, options: Options) -> Sums:
        variables, method = {"params": params}, type(model).run_stacks
        hidden, *_ = self.forward(model, variables, batch, deterministic=True, method=method)
        head, parameters = output_head(model, params)
        tokens = tokens_at_once(hidden, model.config.vocab_size)
        if tokens is None:
            return self._reported(head(parameters, hidden), batch)

        def part(parameters, hidden, targets, weights):
            return self._reported(head(parameters, hidden), {"targets": targets, "weights": weights})

        return sum_in_chunks(part, parameters, hidden, batch["targets"], batch["weights"], tokens)


class LabelTask(Task):
    """Base class of tasks whose targets are the classes in data.labels."""

    best = "highest eval accuracy"

    def decided_by_data(self, recipe: TaskRecipe, dataset: Dataset) -> TaskRecipe:
        """Set model.output.num_classes from the labels of the data."""
        given, labels = recipe.model.output.num_classes, recipe.data.labels
        if given not in (None, len(labels)):
            raise ConfigError(
                f"model.output.num_classes is {given}, but the data has {len(labels)} labels ({', '.join(labels)}). "
                f"Remove it: training sets it."
            )
        return dataclasses.replace(recipe, model=recipe.model.replace(**{"output.num_classes": len(labels)}))

    def kept_from(self, recipe: TaskRecipe, old: TaskRecipe) -> TaskRecipe:
        return self.decided_by_data(recipe, None) if recipe.data.labels else recipe

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        # The head multiplies a single vector per row, which is negligible, and the embedding table computes no logits.
        return 0 if path.startswith(("output/", "head_transform/", "embedding/embedding")) else tokens

    def metric(self, result: EvalLoss) -> float:
        return 1.0 - result.accuracy

    def eval_line(self, loss: float, best: float | None, step: int | None) -> str:
        return f"eval loss: {loss:.4f}" + ("" if best is None else f", best {best:.4f}")


def target_shapes(shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return tokens, targets and weights of the same shape."""
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    return {"tokens": ids, "targets": ids, "weights": jax.ShapeDtypeStruct(shape, jnp.float32)}


def has_router(config: TransformerConfig) -> bool:
    """Return whether the model has MoE layers.

    Only these need a mask of the padding of a decoder's tokens: it comes last, so the causal mask hides it from every
    target with a weight, but routers would count it as tokens of an expert.
    """
    return any(kind.moe is not None for kind in config.kinds)


def row_lengths(weights: Float[Array, "B T"]) -> Array:
    """Return the number of tokens of each row up to the last one with a weight, (B,)."""
    places = jnp.arange(1, 1 + weights.shape[1])[None, :]
    return jnp.where(weights > 0, places, 0).max(1)


def output_head(model: nn.Module, params: PyTree) -> tuple[Callable[..., Outputs], PyTree]:
    """Return a function (head parameters, hidden (B, T, D)) -> logits (B, T, V), and the parameters of the head."""
    method = type(model).head
    return lambda params, hidden: model.apply({"params": params}, hidden, method=method), model.head_parameters(params)


def check_whole_sequences(task: Task, recipe: TaskRecipe) -> None:
    """Raise ConfigError if the mesh axis `context` splits the sequences of a task that can't be split."""
    if recipe.parallel.context not in (1, None):
        raise ConfigError(
            f"parallel.context ({recipe.parallel.context}) can't split the sequences of the task {task.name}. Leave "
            f"it at 1; use fsdp or tensor."
        )


def first_words(text: str, most: int = 40) -> str:
    """Return the beginning of the first line that is not empty, at most `most` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), text.strip())
    return line if len(line) <= most else line[:most].rsplit(" ", 1)[0]
