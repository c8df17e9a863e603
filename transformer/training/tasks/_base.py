"""The base class of training tasks, with everything that differs between tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.data._config import DataKind
from transformer.nn._axes import Array, Float
from transformer.training._settings import TrainingConfig
from transformer.training.tasks._losses import Batch, Scalar, correct, cross_entropy

Outputs: TypeAlias = Float[Array, "..."]
"""logits (B, T, V) or (B, C), or a forecast (B, horizon, channels)"""
Sums: TypeAlias = Mapping[str, Scalar]
"""weighted sums over targets, by name: `correct` (number of correct predictions) or `absolute_error`"""
Shapes: TypeAlias = Mapping[str, Any]
"""a batch: arrays or shapes (B, ...), by name"""


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
    context_axis: ClassVar[bool] = False
    """whether all rows have the same length, so that the mesh axis `context` may split them"""
    lengths: ClassVar[str] = ""
    """fields of the data config that limit the length of its sequences"""

    @abstractmethod
    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model, by name, that follow from a batch (inputs, positions and masks)."""

    def forward(self, model: nn.Module, variables: Any, batch: Batch, **arguments: Any) -> Any:
        """Apply the model with its tree of variables to a batch. Returns the outputs, or the result of `method`."""
        return model.apply(variables, **self.inputs(model.config, batch), **arguments)

    def example(self, config: TransformerConfig) -> tuple[jax.Array, ...]:
        """Return the smallest arguments that initialize the model, such as (1, 1) tokens.

        Parameters don't depend on the batch size or the length.
        """
        return (jnp.zeros((1, 1), jnp.int32),)

    @abstractmethod
    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes (B, ...) of a training batch of `rows` rows, by name; all lengths must be known."""

    def batch_shapes(self, recipe: Any, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return `shapes` of the batch that a recipe trains on, for `rows` rows of its data."""
        return self.shapes(recipe.model, recipe.data, rows)

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        """Return the number of sequences in a batch (B, ...) and their length, as a stack of layers reads them.

        For pairs these are the targets.
        """
        return batch["tokens"].shape

    def layers(self, config: TransformerConfig) -> int:
        """Return the number of layers in all stacks of the model."""
        return config.num_layers

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        """Return how many of a batch's tokens are multiplied by the matrix at a path of the parameters.

        The embedding table counts only if it also computes the logits: looking up a row is not a multiplication.
        """
        return tokens if path != "embedding/embedding" or config.embedding.tie else 0

    def context(self, config: TransformerConfig, data: DataKind) -> int | None:
        """Return the context length of a trained model in tokens; None if it is unlimited."""
        return config.max_length or getattr(data, "max_length", None)

    part: ClassVar[str] = ""
    """path of the part of the model config that describes the shape of the batch's `values`"""
    remedy: ClassVar[str] = ""
    """the data that fits a model, for error messages"""

    def sizes(self, batch: Batch) -> dict[str, int]:
        """Return the sizes of a batch (B, ...), by the field of `part` that must have the same size."""
        return {}

    def check_recipe(self, recipe: Any) -> None:
        """Raise ConfigError for a model or a layout on devices that this task can't use."""
        return

    def decided_by_data(self, recipe: Any, dataset: Any) -> Any:
        """Return the recipe with the fields of its model that only this task takes from the prepared data.

        Raises:
            ConfigError: the recipe sets such a field to another value.
        """
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
        """Compute the sum of the loss over all targets, in `unit`, and the sum of their weights.

        Args:
            outputs: logits (B, T, V) or (B, C), or a forecast.
            batch: arrays by name.
            training: options of the training loss; None: the loss that evaluation reports, without label smoothing and
                z-loss.
        """
        extras = {} if training is None else {"label_smoothing": training.label_smoothing, "z_loss": training.z_loss}
        return cross_entropy(outputs, batch["targets"], batch["weights"], **extras)

    def limited(self, config: TransformerConfig, params: Any) -> Any:
        """Return the trained parameters after an update, with those that have limits inside them."""
        return params

    # The reference model

    needs_reference: ClassVar[bool] = False
    """whether the loss compares the model with a frozen one, the model before training: the task is a `ReferenceTask`,
    whose `compared` replaces `loss` and `measures`"""

    def means(self, recipe: Any) -> Mapping[str, tuple[str, str]]:
        """Return the sums of `ReferenceTask.compared` that training reports as means: for each, its name in the metrics
        and the sum to divide it by.
        """
        return {}

    def keeps_reference(self, recipe: Any) -> bool:
        """Return whether the state contains the parameters of a reference model."""
        return self.needs_reference

    score: ClassVar[str | None] = None
    """name of the score that evaluation computes instead of a loss; the higher, the better"""
    on_policy: ClassVar[bool] = False
    """whether the model itself writes the targets (`_rollouts`), so that the data contains only prompts"""

    def options(self, recipe: Any) -> Any:
        """Return the part of a recipe with the options of this task, the argument `options` of
        `ReferenceTask.compared`; None without such a part.
        """
        return None

    # The evaluation

    labels: ClassVar[bool] = False
    """whether the targets are the classes in data.labels; the best checkpoint is then that with the highest accuracy"""
    outputs: ClassVar[str] = "logits"
    """name of the outputs"""
    baseline: ClassVar[Callable[[Batch], np.ndarray] | None] = None
    """function from a batch to predictions without a model, for comparison"""

    def measures(self, outputs: Outputs, batch: Batch) -> Sums:
        """Compute the sums that evaluation reports in addition to the loss; `outputs` as in `loss`."""
        return {"correct": correct(outputs, batch["targets"], batch["weights"])}

    # The report

    targets: ClassVar[str] = "target tokens"
    """name of the targets, which the weights count"""
    unit: ClassVar[str] = "nats per token"
    """unit of the loss"""
    writes: ClassVar[bool] = False
    """whether the model generates text, so that samples and translations are shown"""
    answers: ClassVar[bool] = False
    """whether the model answers conversations, so that samples are answers and not continuations"""
    exact_answers: ClassVar[bool] = False
    """whether evaluation counts the runs of targets that are all right, the exact match of whole answers"""
    captions: ClassVar[bool] = False
    """whether the model writes captions of images, so that samples are captions"""
    try_it: ClassVar[tuple[str, str] | None] = None
    """command and options that apply a trained model to a text or the path of an image, which follows them; None:
    `evaluate`"""
    picture: ClassVar[str | None] = None
    """file in the workdir with a picture of predictions on held-out data"""


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


def before_the_head(path: str, tokens: int) -> int:
    """Return `Task.tokens_through` of a classifier.

    Its head multiplies a single vector per row, which is negligible, and its embedding table computes no logits.
    """
    return 0 if path.startswith(("output/", "head_transform/", "embedding/embedding")) else tokens
