"""Loss functions. Each returns a sum and a weight, not a mean.

Sums add up to the same loss for any split of a batch into micro-batches, chunks or shards. The caller divides once, at
the end. A mean of the means of the parts would weight each token by the number of padding tokens in its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Float, Int

Scalar: TypeAlias = Float[Array, ""]
Batch: TypeAlias = Mapping[str, Any]
"""arrays by name: tokens (B, T) or values (B, ...), targets, weights, and further inputs of the task's model"""


def cross_entropy(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    weights: Float[Array, "*batch"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Scalar, Scalar]:
    """Compute the cross-entropy between targets and softmax(logits), in float32 for every dtype of the logits.

    Args:
        logits: unnormalized log-probabilities over a vocabulary of size V.
        targets: target ids. A target with weight 0 may have any value, for example -100. Any other target outside the
            vocabulary gives NaN: compiled code cannot raise an error, and clamping would give a plausible loss.
        weights: weight of each target; 0 for padding.
        label_smoothing: e in the smoothed target distribution (1 - e) onehot + e / V (Szegedy et al. 2016, arXiv
            1512.00567, section 7; section 5.4 of the Transformer paper).
        z_loss: factor of the additional loss (ln Z)^2, where Z is the sum of exp(logits) (Chowdhery et al. 2022, arXiv
            2204.02311, section 5). It keeps the normalizer ln Z close to 0.

    Returns:
        The sum of the weighted losses, in nats, and the sum of the weights.
    """
    # float32: logsumexp adds up V terms, and in bfloat16 (8 significant bits) most of them would be lost.
    logits = logits.astype(jnp.float32)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)  # 0 ... V - 1 along the last axis
    # The logit of the target, z_y. A comparison with all ids instead of a gather, because XLA fuses it and its gradient
    # into the other operations, while the gradient of a gather is a slow scatter.
    chosen = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(-1)
    # ln Z = m + ln sum_v exp(z_v - m). logsumexp subtracts the maximum m, since exp(z) overflows float32 for z > 88.
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # Cross-entropy with the smoothed targets q: -sum_v q_v (z_v - ln Z) = ln Z - (1 - e) z_y - e mean_v z_v, because
    # the q_v add up to 1. So no array of log-probabilities is needed.
    loss = log_z - (1.0 - label_smoothing) * chosen
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(-1)
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    known = (targets >= 0) & (targets < logits.shape[-1])
    loss = jnp.where(known, loss, jnp.nan)
    # `where`, not a product alone: NaN * 0 is NaN, so an ignored target such as -100 would spoil the sum.
    return jnp.where(weights > 0, loss * weights, 0.0).sum(), weights.astype(jnp.float32).sum()


def correct(logits: Float[Array, "*batch V"], targets: Int[Array, "*batch"], weights: Float[Array, "*batch"]) -> Scalar:
    """Return the weighted number of targets that have the highest logit."""
    return ((logits.argmax(-1) == targets) * weights).astype(jnp.float32).sum()


def squared_error(
    forecast: Float[Array, "B T C"], targets: Float[Array, "B T C"], weights: Float[Array, "B"]
) -> tuple[Scalar, Scalar]:
    """Compute the sum of squared errors of forecasts, in float32.

    Args:
        forecast: forecast values.
        targets: true values; any value, also NaN, in rows of weight 0.
        weights: weight of each row, which applies to each of its T x C values.

    Returns:
        The weighted sum of (forecast - targets)^2, and the sum of the weights of all values.
    """
    return _weighted(jnp.square(_errors(forecast, targets, weights)), weights), weights.sum() * targets[0].size


def absolute_error(
    forecast: Float[Array, "B T C"], targets: Float[Array, "B T C"], weights: Float[Array, "B"]
) -> Scalar:
    """Return the sum of |forecast - targets|, weighted as in `squared_error`."""
    return _weighted(jnp.abs(_errors(forecast, targets, weights)), weights)


def _errors(forecast, targets, weights):
    """Return forecast - targets, (B, T, C), and 0 in rows of weight 0, so that their values reach no gradient."""
    return jnp.where(weights[:, None, None] > 0, forecast.astype(jnp.float32) - targets, 0.0)


def _weighted(errors: Float[Array, "B T C"], weights: Float[Array, "B"]) -> Scalar:
    """Sum errors over T and C, weight the rows, and sum over rows."""
    return (errors.sum((1, 2)) * weights).sum()
