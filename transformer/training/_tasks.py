"""What a model can learn: one class per task, with everything that differs between tasks, and the table of them.

Code elsewhere never compares names of tasks: it asks the task. A new task is a class here and a line in `TASKS`.
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
"""weighted sums over targets, by name: `correct` (predictions that are right) or `absolute_error`"""
Shapes: TypeAlias = Mapping[str, Any]
"""a batch by name: arrays, or objects with their shape (B, ...)"""


class Task(ABC):
    """Base class of tasks: everything that differs between them. Its defaults are those of a model that reads tokens
    and computes logits.
    """

    name: ClassVar[str]
    """as data kinds and summary.json name it"""
    model: ClassVar[type[nn.Module]]
    """class of the model that is trained"""

    # The batch

    tokens: ClassVar[bool] = True
    """the model reads tokens, so that there are a tokenizer and a vocabulary; otherwise it reads `values`"""
    source: ClassVar[bool] = False
    """an encoder reads a source, and a decoder writes the target of it"""
    context_axis: ClassVar[bool] = False
    """all rows have the same length, so that the mesh axis `context` may split them"""
    lengths: ClassVar[str] = ""
    """fields of the data that bound the length of its sequences"""

    @abstractmethod
    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model, by name, that a batch contains or implies (such as its masks)."""

    def forward(self, model: nn.Module, variables: Any, batch: Batch, **arguments: Any) -> Any:
        """Apply the model, with its tree of variables, to a batch. Returns the outputs, or what `method` returns."""
        return model.apply(variables, **self.inputs(model.config, batch), **arguments)

    def example(self, config: TransformerConfig) -> tuple[jax.Array, ...]:
        """Return the smallest arguments, such as (1, 1) tokens, that initialize the model: parameters depend on neither
        batch size nor length.
        """
        return (jnp.zeros((1, 1), jnp.int32),)

    @abstractmethod
    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes (B, ...) of a training batch of so many rows, by name; all lengths must be known."""

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        """Return the number of rows of a batch (B, ...) as a stack reads them (of pairs: of the targets) and their
        length.
        """
        return batch["tokens"].shape

    def layers(self, config: TransformerConfig) -> int:
        """Return the number of layers in all stacks of the model."""
        return config.num_layers

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        """Return how many of a batch's tokens are multiplied by the matrix at a path of the parameters. The table of
        embeddings is multiplied where it also computes the logits.
        """
        return tokens if path != "embedding/embedding" or config.embedding.tie else 0

    def context(self, config: TransformerConfig, data: DataKind) -> int | None:
        """Return the number of tokens that a trained model can read; None if nothing limits it."""
        return config.max_length or getattr(data, "max_length", None)

    # The loss

    each_token: ClassVar[bool] = False
    """every token has logits, so that `loss` and `measures` may be computed for some tokens at a time"""

    def check(self, training: TrainingConfig) -> None:
        """Raise ConfigError for an option of the loss that this task has no use for."""
        if training.loss_tokens is not None and not self.each_token:
            raise ConfigError(
                f"training.loss_tokens is for tasks with a target for every token, and a {self.name} has none. Leave "
                f"it at None."
            )

    def loss(self, outputs: Outputs, batch: Batch, training: TrainingConfig | None) -> tuple[Scalar, Scalar]:
        """Return (sum, weight) of the loss to minimize, in `unit`; without `training`, of the loss that evaluation
        reports. `outputs` are logits (B, T, V) or (B, C), or a forecast.
        """
        extras = {} if training is None else {"label_smoothing": training.label_smoothing, "z_loss": training.z_loss}
        return cross_entropy(outputs, batch["targets"], batch["weights"], **extras)

    # The evaluation

    labels: ClassVar[bool] = False
    """targets are classes, one for each of data.labels; the best checkpoint is the one with the highest accuracy"""
    outputs: ClassVar[str] = "logits"
    """name of the outputs"""
    baseline: ClassVar[Callable[[Batch], np.ndarray] | None] = None
    """a batch -> predictions without a model, to compare with"""

    def measures(self, outputs: Outputs, batch: Batch) -> Sums:
        """Return what evaluation sums up besides the loss. `outputs` are logits (B, T, V) or (B, C), or a forecast."""
        return {"correct": correct(outputs, batch["targets"], batch["weights"])}

    # The report

    targets: ClassVar[str] = "target tokens"
    """name of what the weights count"""
    unit: ClassVar[str] = "nats per token"
    """unit of the loss"""
    writes: ClassVar[bool] = False
    """the model generates text, token by token: samples and translations are shown"""
    try_it: ClassVar[tuple[str, str] | None] = None
    """command and option that apply a trained model to a text; None: `evaluate`, without an option"""
    picture: ClassVar[str | None] = None
    """file of the workdir with a picture of what the model makes of held-out data"""


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
        return data.sequence_length  # later positions were never trained


class Translation(Task):
    """Write the target that belongs to a source."""

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
                # The causal mask hides padding from every target with a weight, but routers would count it.
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
    """Base class of tasks in which an encoder reads padded texts."""

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
    targets = "hidden tokens"


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

    `part` is the field of the model config that describes them, and `remedy` how to get data of the model's shape.
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
        """Return the sizes of a batch (B, ...), each by the field of `part` that must equal it."""


class ImageClassification(ValuesTask):
    """Predict the class of an image."""

    name = "image_classifier"
    model = VisionClassifier
    labels = True
    targets = "images"
    unit = "nats per image"
    part = "patches"
    remedy = "images of its size"

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        return {"images": batch["values"]}

    def example(self, config: TransformerConfig) -> tuple[jax.Array, ...]:
        patches = config.patches
        return (jnp.zeros((1, patches.image_height, patches.image_width, patches.channels)),)

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        return batch["weights"].shape[0], 1 + config.patches.count

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
    remedy = "it as many columns (--data.columns), and its --data.context-length and --data.horizon"

    @staticmethod
    def baseline(batch: Batch) -> np.ndarray:
        """Repeat the last step of each look-back: the forecast (B, 1, channels) that everything stays as it is."""
        return batch["values"][:, -1:]

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        return {"values": batch["values"]}

    def example(self, config: TransformerConfig) -> tuple[jax.Array, ...]:
        return (jnp.zeros((1, config.series.context_length, config.series.channels)),)

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        targets = jax.ShapeDtypeStruct((rows, config.series.horizon, config.series.channels), jnp.float32)
        return super().shapes(config, data, rows) | {"targets": targets}

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        return batch["weights"].shape[0] * config.series.channels, config.series.positions

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        # The head reads a sequence once; the embedding of a channel is used by one sequence in so many channels.
        shared = {"output": config.series.positions, "channel_embedding": config.series.channels}
        return super().tokens_through(config, path, tokens) // shared.get(path.partition("/")[0], 1)

    def check(self, training: TrainingConfig) -> None:
        if training.label_smoothing or training.z_loss:
            raise ConfigError(
                "training.label_smoothing and training.z_loss are for probabilities, and forecasts have none. Leave "
                "them at 0."
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
    """Tokens, targets and weights of one shape."""
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    return {"tokens": ids, "targets": ids, "weights": jax.ShapeDtypeStruct(shape, jnp.float32)}


def _before_the_head(path: str, tokens: int) -> int:
    """`Task.tokens_through` of a classifier: its head multiplies one vector per row, next to nothing, and its table of
    embeddings computes no logits.
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
"""Every task by the name that data kinds give it."""
