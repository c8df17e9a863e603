"""Training tasks: one class per task, with everything that differs between tasks, and the table `TASKS`.

Other code never compares names of tasks; it uses the attributes and methods of the task. To add a task, write a class
and add it to `TASKS`.
"""

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
from transformer.nn._masks import Mask
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._encoders import Classifier, MaskedLM
from transformer.nn.models._forecaster import Forecaster
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._vision import VisionClassifier
from transformer.training._losses import Batch, Scalar, absolute_error, correct, cross_entropy, squared_error
from transformer.training._settings import TrainingConfig

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
    try_it: ClassVar[tuple[str, str] | None] = None
    """command and option that apply a trained model to a text; None: `evaluate`, without an option"""
    picture: ClassVar[str | None] = None
    """file in the workdir with a picture of predictions on held-out data"""


class LanguageModeling(Task):
    """Predict the next token of running text."""

    name = "causal_lm"
    model = CausalLM
    context_axis = True
    lengths = "data.sequence_length"
    each_token = True
    writes = True
    try_it = ("generate", "--prompt")

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        mask = Mask.segments(batch["segment_ids"]) if "segment_ids" in batch else None
        return {"tokens": batch["tokens"], "positions": batch.get("positions"), "mask": mask}

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return _target_shapes((rows, data.sequence_length))

    def context(self, config: TransformerConfig, data: DataKind) -> int | None:
        return data.sequence_length  # the model is not trained on later positions


class Translation(Task):
    """Generate the target of a source."""

    name = "seq2seq"
    model = Seq2Seq
    source = True
    lengths = "data.max_source_length and data.max_target_length"
    each_token = True
    writes = True
    try_it = ("generate", "--prompt")

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        texts = {"source": batch["source"], "target": batch["tokens"]}
        if "segment_ids" not in batch:
            masks = {"source_mask": Mask.lengths(batch["source_lengths"])}
            if any(kind.moe is not None for kind in config.kinds):
                # Attention does not need this mask: padding comes last, so the causal mask hides it from every target
                # with a weight. But MoE routers would count the padding tokens as tokens of an expert.
                places = jnp.arange(1, 1 + batch["weights"].shape[1])[None, :]
                masks["mask"] = Mask.lengths(jnp.where(batch["weights"] > 0, places, 0).max(1))
            return texts | masks
        source, target = batch["source_segment_ids"], batch["segment_ids"]
        return texts | {
            "source_positions": batch["source_positions"],
            "positions": batch["positions"],
            "source_mask": Mask.segments(source),
            "mask": Mask.segments(target),
            "context_mask": Mask.segments(target, source),
        }

    def example(self, config: TransformerConfig) -> tuple[jax.Array, ...]:
        return super().example(config) * 2

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        source = {
            "source": jax.ShapeDtypeStruct((rows, data.max_source_length), jnp.int32),
            "source_lengths": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
        return _target_shapes((rows, data.max_target_length)) | source

    def layers(self, config: TransformerConfig) -> int:
        return config.encoder_layers + config.decoder_layers


class EncoderTask(Task):
    """Base class of tasks in which an encoder reads texts with padding."""

    lengths = "data.max_length"

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        types = None if config.embedding.token_types is None else batch.get("token_types")
        return {"tokens": batch["tokens"], "mask": Mask.lengths(batch["lengths"]), "token_types": types}

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {
            "tokens": jax.ShapeDtypeStruct((rows, data.max_length), jnp.int32),
            "lengths": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
        targets = _target_shapes((rows, data.max_length) if self.each_token else (rows,))
        return shapes | {name: targets[name] for name in ("targets", "weights")}


class MaskedLanguageModeling(EncoderTask):
    """Predict the masked tokens of a text from the others."""

    name = "masked_lm"
    model = MaskedLM
    each_token = True
    targets = "masked tokens"


class Classification(EncoderTask):
    """Predict the class of a text."""

    name = "classifier"
    model = Classifier
    labels = True
    targets = "texts"
    unit = "nats per text"
    try_it = ("classify", "--text")

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        return _before_the_head(path, tokens)


class ValuesTask(Task):
    """Base class of tasks that read numbers, the batch's `values`.

    `part` names the field of the model config that describes the shape of the values. `remedy` names the data that
    fits the model, for error messages.
    """

    tokens = False
    part: ClassVar[str]
    remedy: ClassVar[str]

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        (example,) = self.example(config)
        return {
            "values": jax.ShapeDtypeStruct((rows, *example.shape[1:]), jnp.float32),
            "targets": jax.ShapeDtypeStruct((rows,), jnp.int32),
            "weights": jax.ShapeDtypeStruct((rows,), jnp.float32),
        }

    @abstractmethod
    def sizes(self, batch: Batch) -> dict[str, int]:
        """Return the sizes of a batch (B, ...), by the field of `part` that must have the same size."""


class ImageClassification(ValuesTask):
    """Predict the class of an image."""

    name = "image_classifier"
    model = VisionClassifier
    labels = True
    targets = "images"
    unit = "nats per image"
    part = "patches"
    remedy = "images of the model's size"

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        return {"images": batch["values"]}

    def example(self, config: TransformerConfig) -> tuple[jax.Array, ...]:
        patches = config.patches
        return (jnp.zeros((1, patches.image_height, patches.image_width, patches.channels)),)

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        return batch["weights"].shape[0], 1 + config.patches.count  # the class token and one token per patch

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        return _before_the_head(path, tokens)

    def sizes(self, batch: Batch) -> dict[str, int]:
        return dict(zip(("image_height", "image_width", "channels"), batch["values"].shape[1:], strict=True))


class Forecasting(ValuesTask):
    """Forecast the next steps of a time series."""

    name = "forecaster"
    model = Forecaster
    outputs = "forecasts"
    targets = "forecast values"
    unit = "mean squared error"
    picture = "forecasts.png"
    part = "series"
    remedy = "as many columns as the model (--data.columns), and its --data.context-length and --data.horizon"

    @staticmethod
    def baseline(batch: Batch) -> np.ndarray:
        """Repeat the last step of each look-back window: a forecast (B, 1, channels) of constant values."""
        return batch["values"][:, -1:]

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        return {"values": batch["values"]}

    def example(self, config: TransformerConfig) -> tuple[jax.Array, ...]:
        return (jnp.zeros((1, config.series.context_length, config.series.channels)),)

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        targets = jax.ShapeDtypeStruct((rows, config.series.horizon, config.series.channels), jnp.float32)
        return super().shapes(config, data, rows) | {"targets": targets}

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        # Channels are independent: each is a sequence of its own with the same parameters.
        return batch["weights"].shape[0] * config.series.channels, config.series.positions

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        # `tokens` counts every position of every channel. The head multiplies each sequence once, not once per
        # position; the embedding of a channel is used only by the sequences of that channel.
        shared = {"output": config.series.positions, "channel_embedding": config.series.channels}
        return super().tokens_through(config, path, tokens) // shared.get(path.partition("/")[0], 1)

    def check(self, training: TrainingConfig) -> None:
        if training.label_smoothing or training.z_loss:
            raise ConfigError(
                "training.label_smoothing and training.z_loss need logits, and forecasts have none. Leave them at 0."
            )
        super().check(training)

    def loss(self, outputs: Outputs, batch: Batch, training: TrainingConfig | None) -> tuple[Scalar, Scalar]:
        return squared_error(outputs, batch["targets"], batch["weights"])

    def measures(self, outputs: Outputs, batch: Batch) -> Sums:
        return {"absolute_error": absolute_error(outputs, batch["targets"], batch["weights"])}

    def sizes(self, batch: Batch) -> dict[str, int]:
        length, channels = batch["values"].shape[1:]
        return {"context_length": length, "channels": channels, "horizon": batch["targets"].shape[1]}


def _target_shapes(shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return tokens, targets and weights of the same shape."""
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    return {"tokens": ids, "targets": ids, "weights": jax.ShapeDtypeStruct(shape, jnp.float32)}


def _before_the_head(path: str, tokens: int) -> int:
    """Return `Task.tokens_through` of a classifier.

    Its head multiplies a single vector per row, which is negligible, and its embedding table computes no logits.
    """
    return 0 if path.startswith(("output/", "head_transform/", "embedding/embedding")) else tokens


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        LanguageModeling(),
        Translation(),
        Classification(),
        MaskedLanguageModeling(),
        ImageClassification(),
        Forecasting(),
    )
}
"""all tasks, by name"""
