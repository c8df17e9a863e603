"""What a run may learn to do: one row a task, which says all that differs between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.axes import Array, Float, PRNGKey
from transformer.config import TransformerConfig
from transformer.masks import Mask
from transformer.models import CausalLM, Classifier, Forecaster, MaskedLM, Seq2Seq, VisionClassifier
from transformer.training.losses import Batch, Scalar, absolute_error, correct, cross_entropy, squared_error
from transformer.training.settings import TrainingConfig

Forward: TypeAlias = Callable[..., Any]
"""(model, variables, batch, **arguments) -> outputs, or (outputs, aux) with method=with_aux"""
Outputs: TypeAlias = Float[Array, "..."]
"""logits (B, T, V) or (B, C), or a forecast (B, horizon, channels)"""
Sums: TypeAlias = Mapping[str, Scalar]
"""weighted sums over targets, by name: `correct`, those hit, or `absolute_error`"""


def _causal_lm(model: nn.Module, variables: Any, batch: Batch, **kwargs) -> Any:
    mask = Mask.segments(batch["segment_ids"]) if "segment_ids" in batch else None
    return model.apply(variables, batch["tokens"], positions=batch.get("positions"), mask=mask, **kwargs)


def _seq2seq(model: nn.Module, variables: Any, batch: Batch, **kwargs) -> Any:
    if "segment_ids" not in batch:
        source_mask = Mask.lengths(batch["source_lengths"])
        return model.apply(variables, batch["source"], batch["tokens"], source_mask=source_mask, **kwargs)
    source, target = batch["source_segment_ids"], batch["segment_ids"]
    return model.apply(
        variables,
        batch["source"],
        batch["tokens"],
        source_positions=batch["source_positions"],
        positions=batch["positions"],
        source_mask=Mask.segments(source),
        mask=Mask.segments(target),
        context_mask=Mask.segments(target, source),
        **kwargs,
    )


def _encoder(model: nn.Module, variables: Any, batch: Batch, **kwargs) -> Any:
    types = None if model.config.token_types is None else batch.get("token_types")
    mask = Mask.lengths(batch["lengths"])
    return model.apply(variables, batch["tokens"], mask=mask, token_types=types, **kwargs)


def _values(model: nn.Module, variables: Any, batch: Batch, **kwargs) -> Any:
    return model.apply(variables, batch["values"], **kwargs)


def _token(config: TransformerConfig) -> tuple[jax.Array, ...]:
    return (jnp.zeros((1, 1), jnp.int32),)


def _two_tokens(config: TransformerConfig) -> tuple[jax.Array, ...]:
    return _token(config) * 2


def _look_back(config: TransformerConfig) -> tuple[jax.Array, ...]:
    return (jnp.zeros((1, config.series.context_length, config.series.channels)),)


def _image(config: TransformerConfig) -> tuple[jax.Array, ...]:
    patches = config.patches
    return (jnp.zeros((1, patches.image_height, patches.image_width, patches.channels)),)


def _entropy(logits: Outputs, batch: Batch, training: TrainingConfig | None) -> tuple[Scalar, Scalar]:
    extras = {} if training is None else {"label_smoothing": training.label_smoothing, "z_loss": training.z_loss}
    return cross_entropy(logits, batch["targets"], batch["weights"], **extras)


def _hits(logits: Outputs, batch: Batch) -> Sums:
    return {"correct": correct(logits, batch["targets"], batch["weights"])}


def _squares(forecast: Outputs, batch: Batch, training: TrainingConfig | None) -> tuple[Scalar, Scalar]:
    return squared_error(forecast, batch["targets"], batch["weights"])


def _magnitudes(forecast: Outputs, batch: Batch) -> Sums:
    return {"absolute_error": absolute_error(forecast, batch["targets"], batch["weights"])}


@dataclass(frozen=True, kw_only=True)
class Task:
    """All that differs between tasks: the `model` that is trained, how it reads a batch, and what it is measured by."""

    model: type[nn.Module]
    forward: Forward
    """how the model reads a batch"""
    example: Callable[[TransformerConfig], tuple[jax.Array, ...]] = _token
    """smallest arguments that initialize the model: parameters don't depend on batch or length"""
    loss: Callable[[Outputs, Batch, TrainingConfig | None], tuple[Scalar, Scalar]] = _entropy
    """outputs, batch, training -> (sum, weight) of what is minimized; without `training` what evaluation measures"""
    measures: Callable[[Outputs, Batch], Sums] = _hits
    """outputs, batch -> what else evaluation sums up"""
    targets: str = "target tokens"
    """what the weights count"""
    unit: str = "nats per token"
    """of the loss"""
    tokens: bool = True
    """reads tokens: there are a tokenizer and a vocabulary; else numbers, the batch's `values`"""
    writes: bool = False
    """writes tokens one after the other: texts can be generated"""
    labels: bool = False
    """targets are classes, one for each of data.labels"""
    lengths: str = ""
    """fields of the data that bound the length of its sequences"""


TASKS: dict[str, Task] = {
    "causal_lm": Task(model=CausalLM, forward=_causal_lm, writes=True, lengths="data.sequence_length"),
    "seq2seq": Task(
        model=Seq2Seq,
        forward=_seq2seq,
        example=_two_tokens,
        writes=True,
        lengths="data.max_source_length and data.max_target_length",
    ),
    "classifier": Task(
        model=Classifier,
        forward=_encoder,
        targets="texts",
        unit="nats per text",
        labels=True,
        lengths="data.max_length",
    ),
    "masked_lm": Task(model=MaskedLM, forward=_encoder, targets="hidden tokens", lengths="data.max_length"),
    "image_classifier": Task(
        model=VisionClassifier,
        forward=_values,
        example=_image,
        targets="images",
        unit="nats per image",
        tokens=False,
        labels=True,
    ),
    "forecaster": Task(
        model=Forecaster,
        forward=_values,
        example=_look_back,
        loss=_squares,
        measures=_magnitudes,
        targets="forecast values",
        unit="mean squared error",
        tokens=False,
    ),
}
"""Tasks by what data calls them."""


def batch_outputs(
    task: str, model: nn.Module, params: Any, batch: Batch, dropout_key: PRNGKey | None = None
) -> Outputs:
    """Logits of a batch, (B, T, V) or (B, C), or its forecast (B, horizon, channels); dropout when a key is given."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return TASKS[task].forward(model, {"params": params}, batch, deterministic=dropout_key is None, rngs=rngs)


def outputs_and_router_loss(
    task: str, model: nn.Module, params: Any, batch: Batch, dropout_key: PRNGKey | None = None
) -> tuple[Outputs, Scalar | None]:
    """`batch_outputs` (with a tree of parameters), and what routed layers add to the training loss: a sum over tokens,
    as `cross_entropy`'s, in nats (Fedus et al. 2021, arXiv 2101.03961, section 2.2); None without such layers. Rows of
    weight 0 add nothing.
    """
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    outputs, aux = TASKS[task].forward(
        model, {"params": params}, batch, deterministic=dropout_key is None, rngs=rngs, method=type(model).with_aux
    )
    if not aux:
        return outputs, None
    weights = batch["weights"]
    counts = (weights > 0).any(tuple(range(1, weights.ndim)))
    return outputs, jnp.where(counts, sum(aux.values()), 0.0).sum()
