"""What is minimized, as a sum and a weight, so that any split of a batch adds up to the same number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Float, Int

Scalar: TypeAlias = Float[Array, ""]
Batch: TypeAlias = Mapping[str, Any]
"""arrays by name: tokens (B, T) or values (B, ...), targets and weights, and what the task's model reads besides"""


def cross_entropy(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    weights: Float[Array, "*batch"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Scalar, Scalar]:
    """(sum of weighted losses in nats, sum of weights), in float32 whatever the logits are.

    With label smoothing e the target's distribution is (1 - e) onehot + e / V (Szegedy et al. 2016, arXiv 1512.00567,
    section 7; the paper's 5.4). Each loss gets `z_loss` times the square of ln Z, Z being the sum of exp(logits)
    (Chowdhery et al. 2022, arXiv 2204.02311, section 5). Where the weight is 0 the target may be anything, -100
    included. Elsewhere a target outside the vocabulary gives NaN: compiled code can't raise, and clamping would give a
    plausible number.
    """
    logits = logits.astype(jnp.float32)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # A comparison instead of a gather: its derivative is fused, a gather's is a scatter.
    chosen = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(-1)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    loss = log_z - (1.0 - label_smoothing) * chosen
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(-1)
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    known = (targets >= 0) & (targets < logits.shape[-1])
    loss = jnp.where(known, loss, jnp.nan)
    return jnp.where(weights > 0, loss * weights, 0.0).sum(), weights.astype(jnp.float32).sum()


def correct(logits: Float[Array, "*batch V"], targets: Int[Array, "*batch"], weights: Float[Array, "*batch"]) -> Scalar:
    """Weighted count of targets that have the highest logit."""
    return ((logits.argmax(-1) == targets) * weights).astype(jnp.float32).sum()


def squared_error(
    forecast: Float[Array, "B T C"], targets: Float[Array, "B T C"], weights: Float[Array, "B"]
) -> tuple[Scalar, Scalar]:
    """(sum of weighted squares of forecast - targets, sum of weights over their numbers), in float32.

    A row's weight is that of each of its numbers; where it is 0 the targets may be anything.
    """
    return _weighted(jnp.square(_errors(forecast, targets, weights)), weights), weights.sum() * targets[0].size


def absolute_error(
    forecast: Float[Array, "B T C"], targets: Float[Array, "B T C"], weights: Float[Array, "B"]
) -> Scalar:
    """Sum of weighted magnitudes of forecast - targets, as `squared_error` weighs."""
    return _weighted(jnp.abs(_errors(forecast, targets, weights)), weights)


def _errors(forecast, targets, weights):
    """forecast - targets, 0 where the weight is: what stands there, NaN even, reaches no gradient."""
    return jnp.where(weights[:, None, None] > 0, forecast.astype(jnp.float32) - targets, 0.0)


def _weighted(errors: Float[Array, "B T C"], weights: Float[Array, "B"]) -> Scalar:
    return (errors.sum((1, 2)) * weights).sum()
