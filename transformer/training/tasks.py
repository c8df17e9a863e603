"""What a run may learn to do: one row a task, which says all that differs between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.config import TransformerConfig
from transformer.nn.axes import Array, Float, PRNGKey
from transformer.nn.masks import Mask
from transformer.nn.models import CausalLM, Classifier, Forecaster, MaskedLM, Seq2Seq, VisionClassifier
from transformer.training.chunked_loss import loss_in_chunks, sum_in_chunks, tokens_at_once
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
        masks = {"source_mask": Mask.lengths(batch["source_lengths"])}
        config = model.config
        if any(kind.moe is not None for kind in config.kinds):
            # Causality hides padding from all targets that weigh something; routers would count it.
            places = jnp.arange(1, 1 + batch["weights"].shape[1])[None, :]
            masks["mask"] = Mask.lengths(jnp.where(batch["weights"] > 0, places, 0).max(1))
        return model.apply(variables, batch["source"], batch["tokens"], **masks, **kwargs)
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
    each_token: bool = False
    """every token has logits, so that `loss` and `measures` may be those of a part of them at a time"""
    labels: bool = False
    """targets are classes, one for each of data.labels"""
    lengths: str = ""
    """fields of the data that bound the length of its sequences"""


TASKS: dict[str, Task] = {
    "causal_lm": Task(model=CausalLM, forward=_causal_lm, writes=True, each_token=True, lengths="data.sequence_length"),
    "seq2seq": Task(
        model=Seq2Seq,
        forward=_seq2seq,
        example=_two_tokens,
        writes=True,
        each_token=True,
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
    "masked_lm": Task(
        model=MaskedLM, forward=_encoder, each_token=True, targets="hidden tokens", lengths="data.max_length"
    ),
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


def training_loss(
    task: str, model: nn.Module, params: Any, batch: Batch, training: TrainingConfig, dropout_key: PRNGKey | None
) -> tuple[Scalar, Scalar, Scalar | None]:
    """(loss sum, weight, router loss) of a batch with a tree of parameters, dropout when a key is given. The last is
    what routed layers add to the loss: a sum over tokens, as `cross_entropy`'s, in nats (Fedus et al. 2021, arXiv
    2101.03961, section 2.2); None without such layers. Rows of weight 0 add nothing.
    """
    kind, weights = TASKS[task], batch["weights"]
    method = type(model).hidden_with_aux if kind.each_token else type(model).with_aux
    outputs, aux = _forward(task, model, params, batch, dropout_key, method)
    if kind.each_token:
        loss_sum, weight = _token_loss(kind, model, params, outputs, batch, training)
    else:
        loss_sum, weight = kind.loss(outputs, batch, training)
    if not aux:
        return loss_sum, weight, None
    counts = (weights > 0).any(tuple(range(1, weights.ndim)))
    return loss_sum, weight, jnp.where(counts, sum(aux.values()), 0.0).sum()


def evaluation_sums(task: str, model: nn.Module, params: Any, batch: Batch) -> Sums:
    """Sums over a batch: `loss_sum` (without what training adds to it), `weight`, and the task's measures."""
    kind = TASKS[task]

    def sums(outputs, batch):
        loss_sum, weight = kind.loss(outputs, batch, None)
        return {"loss_sum": loss_sum, "weight": weight, **kind.measures(outputs, batch)}

    if not kind.each_token:
        return sums(_forward(task, model, params, batch, None, type(model).with_aux)[0], batch)
    hidden, _ = _forward(task, model, params, batch, None, type(model).hidden_with_aux)
    head, parameters = _head(model, params)
    tokens = tokens_at_once(hidden, model.config.vocab_size)
    if tokens is None:
        return sums(head(parameters, hidden), batch)

    def part(parameters, hidden, targets, weights):
        return sums(head(parameters, hidden), {"targets": targets, "weights": weights})

    return sum_in_chunks(part, parameters, hidden, batch["targets"], batch["weights"], tokens)


def _forward(task, model, params, batch, dropout_key, method):
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return TASKS[task].forward(
        model, {"params": params}, batch, deterministic=dropout_key is None, rngs=rngs, method=method
    )


def _head(model: nn.Module, params: Any) -> tuple[Callable[..., Outputs], Any]:
    """(parameters, hidden (B, T, D)) -> logits (B, T, V), and the parameters."""
    method = type(model).head
    return lambda params, hidden: model.apply({"params": params}, hidden, method=method), model.head_parameters(params)


def _token_loss(kind, model, params, hidden, batch, training):
    head, parameters = _head(model, params)
    tokens = training.loss_tokens
    if tokens is None:
        tokens = tokens_at_once(hidden, model.config.vocab_size)
    if not tokens:
        return kind.loss(head(parameters, hidden), batch, training)

    def part(parameters, hidden, targets, weights):
        return kind.loss(head(parameters, hidden), {"targets": targets, "weights": weights}, training)[0]

    loss_sum = loss_in_chunks(part, parameters, hidden, batch["targets"], batch["weights"], tokens)
    return loss_sum, batch["weights"].sum().astype(jnp.float32)
