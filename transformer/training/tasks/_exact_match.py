"""Evaluation on conversations: the loss of the trained tokens, and the exact match of whole answers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.nn._axes import Array, Bool, Float, Int
from transformer.training.tasks._base import Sums
from transformer.training.tasks._log_probabilities import chosen_log_probabilities, token_values
from transformer.training.tasks._losses import Batch, Scalar


def answer_sums(model: nn.Module, params: PyTree, inputs: dict[str, Any], batch: Batch) -> Sums:
    """Compute sums over a batch of conversations, without dropout.

    Greedy decoding writes an answer exactly if every token of the answer has the highest logit after the tokens before
    it. So one forward pass shows whether a greedy answer equals its reference, and no text is generated. `inputs` are
    the arguments of the model that follow from the batch: targets and weights (B, T), and in packed rows segment_ids
    (B, T). Returns `loss_sum` in nats, `weight`, `correct` (tokens), `exact_answers` and `answers`.
    """
    targets, weights = batch["targets"], batch["weights"]

    def values(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]):
        return chosen_log_probabilities(logits, targets), logits.argmax(-1) == targets

    (scores, right), _ = token_values(values, model, params, inputs, targets, deterministic=True)
    exact, answers = exact_answers(right, weights, batch.get("segment_ids"))
    return {
        # `where`, not a product alone: NaN * 0 is NaN.
        "loss_sum": jnp.where(weights > 0, -scores * weights, 0.0).sum(),
        "weight": weights.astype(jnp.float32).sum(),
        "correct": jnp.where(right, weights, 0.0).astype(jnp.float32).sum(),
        "exact_answers": exact,
        "answers": answers,
    }


def exact_answers(
    right: Bool[Array, "B T"], weights: Float[Array, "B T"], segments: Int[Array, "B T"] | None = None
) -> tuple[Scalar, Scalar]:
    """Count the answers (runs of targets with a weight, in one segment) whose targets are all right, and all."""
    inside = weights > 0
    if segments is None:
        segments = jnp.zeros_like(inside, jnp.int32)
    before = jnp.pad(inside, ((0, 0), (1, 0)))[:, :-1] & (segments == jnp.roll(segments, 1, 1))
    starts = inside & ~before
    # (B, T): number of wrong targets before each position, and that number at the start of its answer. Both never
    # decrease along a row, so that the largest one so far belongs to the last start.
    wrong = (inside & ~right).astype(jnp.int32)
    so_far = wrong.cumsum(1)
    at_start = jax.lax.cummax(jnp.where(starts, so_far - wrong, 0), axis=1)
    ends = inside & ~(jnp.pad(inside & ~starts, ((0, 0), (0, 1)))[:, 1:])
    return (ends & (so_far == at_start)).sum().astype(jnp.float32), starts.sum().astype(jnp.float32)
