"""The loss of a training batch and the sums of an evaluation, for every task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from transformer.nn._axes import PRNGKey
from transformer.training._chunked_loss import loss_in_chunks, sum_in_chunks, tokens_at_once
from transformer.training._losses import Batch, Scalar
from transformer.training._settings import TrainingConfig
from transformer.training._tasks import TASKS, Outputs, Sums


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
