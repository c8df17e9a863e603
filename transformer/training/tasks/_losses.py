"""Loss functions. Each returns a sum and a weight, not a mean.

Sums add up to the same loss for any split of a batch into micro-batches, chunks or shards. The caller divides once, at
the end. A mean of the means of the parts would weight each token by the number of padding tokens in its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

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
    """Compute the sums of the weighted cross-entropies of targets and softmax(logits), in nats, and of the weights.

    In float32 for every dtype of the logits. A target with weight 0 may have any value, for example -100. Any other
    target outside the vocabulary gives NaN: compiled code cannot raise an error, and clamping would give a plausible
    loss.

    Args:
        label_smoothing: e in the smoothed target distribution (1 - e) onehot + e / V (Szegedy et al. 2016, arXiv
            1512.00567, section 7; section 5.4 of the Transformer paper).
        z_loss: factor of the additional loss (ln Z)^2, where Z is the sum of exp(logits) (Chowdhery et al. 2022, arXiv
            2204.02311, section 5). It keeps the normalizer ln Z close to 0.
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


def ctc_loss(
    logits: Float[Array, "B T V"],
    lengths: Int[Array, " B"],
    targets: Int[Array, "B t"],
    target_lengths: Int[Array, " B"],
    blank_id: int = 0,
) -> tuple[Scalar, Scalar]:
    """Compute the loss of connectionist temporal classification (Graves et al. 2006, doi 10.1145/1143844.1143891).

    It is -ln p(targets), where p sums over all sequences of T tokens that become the targets if repeated tokens are
    merged and blanks are removed (section 4.1).

    Args:
        logits: unnormalized log-probabilities of each frame.
        lengths: number of frames of each row.
        targets: target ids without blanks, with any valid ids as padding.
        target_lengths: number of targets of each row.
        blank_id: the blank, the padding token of wav2vec 2.0.

    Returns:
        The sum of the losses of the rows, in nats, and the number of targets. A row whose targets do not fit into its
        frames (one frame for each target, and a blank between two equal ones) has an infinite loss.
    """
    positions = jnp.arange(targets.shape[1])[None, :]
    frames = jnp.arange(logits.shape[1])[None, :]
    padding = (positions >= target_lengths[:, None]).astype(jnp.float32)
    logit_padding = (frames >= lengths[:, None]).astype(jnp.float32)
    losses = optax.ctc_loss(logits.astype(jnp.float32), logit_padding, targets, padding, blank_id=blank_id)
    # optax replaces ln 0 by -1e5, so that a sequence without any alignment would have a plausible, finite loss.
    repeated = (targets[:, 1:] == targets[:, :-1]) & (positions[:, 1:] < target_lengths[:, None])
    fits = target_lengths + repeated.sum(1) <= lengths
    return jnp.where(fits, losses, jnp.inf).sum(), target_lengths.sum().astype(jnp.float32)


def correct(logits: Float[Array, "*batch V"], targets: Int[Array, "*batch"], weights: Float[Array, "*batch"]) -> Scalar:
    """Return the weighted number of targets that have the highest logit."""
    return ((logits.argmax(-1) == targets) * weights).astype(jnp.float32).sum()


def squared_error(
    forecast: Float[Array, "B T C"], targets: Float[Array, "B T C"], weights: Float[Array, "B"]
) -> tuple[Scalar, Scalar]:
    """Compute the weighted sum of (forecast - targets)^2, in float32, and the sum of the weights of all values.

    A row's weight applies to each of its T x C values. In rows of weight 0, targets may be anything, also NaN.
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


def matched_by_softmax(logits: Float[Array, "B B"], weights: Float[Array, "B"]) -> tuple[Scalar, Scalar]:
    """Compute sum (nats) and weight of the loss of CLIP, in float32 (Radford et al. 2021, arXiv 2103.00020, figure 3).

    It is the mean of two cross-entropies: of the captions given each image, and of the images given each caption. The
    logits are those of image i (row) and caption j (column); the pairs (i, i) belong together. A pair of weight 0 is
    also no alternative for the others.
    """
    logits = _among_counted(logits, weights)
    numbers = jnp.arange(len(weights))
    of_texts, weight = cross_entropy(logits, numbers, weights)
    of_images, _ = cross_entropy(logits.T, numbers, weights)
    return (of_texts + of_images) / 2, weight


def matched_by_sigmoid(logits: Float[Array, "B B"], weights: Float[Array, "B"]) -> tuple[Scalar, Scalar]:
    """Compute the loss of SigLIP, in float32 (Zhai et al. 2023, arXiv 2303.15343, equation 1).

    Each image and caption is a binary decision: whether they belong together. The loss of a row is the sum over all
    captions. Arguments and results are those of `matched_by_softmax`.
    """
    logits, inside = logits.astype(jnp.float32), weights > 0
    signs = 2.0 * jnp.eye(len(weights)) - 1.0  # 1 on the diagonal, otherwise -1
    # -log_sigmoid(x) = log(1 + exp(-x)), which overflows for no x.
    losses = jnp.where(inside[:, None] & inside[None, :], -jax.nn.log_sigmoid(signs * logits), 0.0)
    return (losses.sum(1) * weights).sum(), weights.astype(jnp.float32).sum()


def matches(logits: Float[Array, "B B"], weights: Float[Array, "B"]) -> tuple[Scalar, Scalar]:
    """Return the weighted number of images whose own caption has the highest logit, and of captions likewise."""
    logits, numbers = _among_counted(logits, weights), jnp.arange(len(weights))
    return correct(logits, numbers, weights), correct(logits.T, numbers, weights)


def _among_counted(logits: Float[Array, "B B"], weights: Float[Array, "B"]) -> Float[Array, "B B"]:
    """Return logits (B, B) in float32, those of pairs of weight 0 so low that nothing matches them."""
    inside = weights > 0
    # Finite, because a row without any alternative would otherwise be NaN, and its gradient too.
    return jnp.where(inside[:, None] & inside[None, :], logits.astype(jnp.float32), -1e9)
