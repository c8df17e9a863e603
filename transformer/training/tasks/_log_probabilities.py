"""Log-probabilities and greedy matches of given tokens, without the logits of all positions in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.nn._axes import Array, Bool, Float, Hidden, Int
from transformer.nn._partitioning import num_shards
from transformer.training.tasks._chunked_loss import tokens_at_once
from transformer.training.tasks._losses import Batch, Scalar


def log_probabilities(
    model: nn.Module, params: PyTree, inputs: dict[str, Any], targets: Int[Array, "B T"], **options: Any
) -> tuple[Float[Array, "B T"], dict[str, Array]]:
    """Compute the log-probability of each target, in nats, in float32, with the arguments of `token_values`."""
    return token_values(chosen_log_probabilities, model, params, inputs, targets, **options)


def token_values(
    function: Callable[[Float[Array, "B T V"], Int[Array, "B T"]], PyTree],
    model: nn.Module,
    params: PyTree,
    inputs: dict[str, Any],
    targets: Int[Array, "B T"],
    *,
    tokens: int | None = None,
    **options: Any,
) -> tuple[PyTree, dict[str, Array]]:
    """Compute values of each target from its logits; return them, and the router losses of MoE layers, (B,) by name.

    `function` maps logits (B, T, V) and targets (B, T) to a pytree of values (B, T). `tokens` is the number of tokens
    per device whose logits are in memory at a time; 0: all; None: a default. `options` are further arguments of the
    model.
    """
    hidden, _, aux = model.apply({"params": params}, **inputs, **options, method=type(model).run_stacks)
    method = type(model).head

    def of_targets(parameters, hidden, targets):
        return function(model.apply({"params": parameters}, hidden, method=method), targets)

    if tokens is None:
        tokens = tokens_at_once(hidden, model.config.vocab_size) or 0
    rows = max(hidden.shape[0] // num_shards("batch"), 1)  # of a device
    positions = max(tokens // rows, 1) if tokens else hidden.shape[1]
    return _in_pieces(of_targets, model.head_parameters(params), hidden, targets, positions), aux


def chosen_log_probabilities(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Return log softmax(logits) at the targets, in float32."""
    logits = logits.astype(jnp.float32)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # A comparison with all ids instead of a gather, as in `cross_entropy`: its gradient is not a scatter.
    chosen = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _in_pieces(function: Callable, parameters: PyTree, hidden: Hidden, targets: Array, positions: int) -> PyTree:
    """Return the values (B, T) of `function`, for some positions of all rows at a time; logits are not stored."""
    rows, length = targets.shape
    pieces = math.ceil(length / positions)
    if pieces == 1:
        return function(parameters, hidden, targets)
    each = math.ceil(length / pieces)

    def split(array):
        """(B, T, ...) -> (pieces, B, each, ...), padded with zeros."""
        widths = [(0, 0), (0, pieces * each - length), *[(0, 0)] * (array.ndim - 2)]
        return jnp.pad(array, widths).reshape(rows, pieces, each, *array.shape[2:]).swapaxes(0, 1)

    piece = jax.checkpoint(lambda one: function(parameters, *one))
    values = jax.lax.map(piece, (split(hidden), split(targets)))  # (pieces, B, each)
    return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(rows, pieces * each)[:, :length], values)


def answer_sums(model: nn.Module, params: PyTree, inputs: dict[str, Any], batch: Batch) -> dict[str, Scalar]:
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
