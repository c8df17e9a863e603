"""The router of a mixture of experts: it selects experts for each token, within their capacity, and has its own losses.

Shapes in addition to those of `_axes.py`: E experts, of which each token is sent to k.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._parts import MoE
from transformer.nn._axes import Array, DType, Hidden
from transformer.nn._masks import Mask, real_tokens
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import explicit_spec, in_auto_axes, shard_map
from transformer.nn.layers._layers import Initializer, glorot_uniform
from transformer.nn.layers._norms import unscaled_rms_norm
from transformer.nn.quantization._linear import linear


class Router(nn.Module):
    """Owns the parameters of the router; returns logits (B, T, E), and selected experts and weights (B, T, k)."""

    parameter_axes = declare(
        {"router/kernel": "embed -> _", "router/bias": "_", "router/selection_bias": "_"}
        | {"shared_gate/kernel": "embed -> _", "router/input_scale": "norm", "router/expert_scale": "_"},
        role="output",
    )

    moe: MoE
    kernel_init: Initializer | None
    param_dtype: DType
    norm_epsilon: float

    @nn.compact
    def __call__(self, x: Hidden) -> tuple[Array, Array, Array]:
        moe, experts = self.moe, self.moe.num_experts
        zeros = nn.initializers.zeros
        if moe.router_norm:
            scale = self.param("input_scale", nn.initializers.ones, x.shape[-1:], self.param_dtype)
            x = unscaled_rms_norm(x.astype(jnp.float32), self.norm_epsilon)
            x = x * scale.astype(jnp.float32)[None, None] * x.shape[-1] ** -0.5
        kernel = self.param("kernel", self.kernel_init or glorot_uniform(), (x.shape[-1], experts), self.param_dtype)
        bias = self.param("bias", zeros, (experts,), self.param_dtype) if moe.router_bias else None
        # In float32: small rounding errors of the logits would change which experts are selected.
        logits = linear(*nn.dtypes.promote_dtype(x, kernel, bias, dtype=jnp.float32))  # (B, T, E)
        scores = router_scores(logits, moe.scoring)
        # Selection is not differentiable. The router learns through the weights, which are taken from `scores` below.
        selection_scores = jax.lax.stop_gradient(scores)
        if moe.e_score_correction_bias:
            # Added for the selection only, not to the weights (auxiliary-loss-free balancing, arXiv 2412.19437, section
            # 2.1.2). Always float32: the bias may be much larger than the differences between scores.
            selection_bias = self.param("selection_bias", zeros, (experts,), jnp.float32)
            selection_scores = selection_scores + jax.lax.stop_gradient(selection_bias)[None, None]
        # Each device selects for its own rows: a compiler that can't partition top_k would gather all scores first.
        names = ("batch", "length", None)
        chosen = in_auto_axes(
            shard_map(functools.partial(choose, moe), [names], names), explicit_spec(selection_scores)
        )(selection_scores)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if moe.normalize_weights:
            # The best softmax scores have a positive sum, but sigmoids may all round to 0: avoid 0 / 0.
            weights = weights / (weights.sum(-1, keepdims=True) + (1e-20 if moe.scoring == "sigmoid" else 0.0))
        if moe.expert_scale:
            scale = self.param("expert_scale", nn.initializers.ones, (experts,), self.param_dtype)
            weights = weights * scale.astype(jnp.float32)[chosen]
        return logits, chosen, weights * moe.routed_scaling_factor


def router_scores(logits: Array, scoring: str) -> Array:
    """Convert logits to scores (B, T, E): a softmax, or one sigmoid per expert (arXiv 2412.19437, section 2.1.2)."""
    return jax.nn.sigmoid(logits) if scoring == "sigmoid" else jax.nn.softmax(logits)


def choose(moe: MoE, scores: Array) -> Array:
    """Select the `top_k` experts with the highest scores: (B, T, E) -> (B, T, k). Of equal scores, the first wins.

    With groups, experts are selected from the `top_groups` groups whose two best experts have the highest sum of
    scores, so that a token is sent to few devices (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2).
    """
    if moe.top_groups < moe.num_groups:
        groups = scores.reshape(*scores.shape[:-1], moe.num_groups, -1)  # (B, T, groups, experts of a group)
        best = jax.lax.top_k(jax.lax.top_k(groups, 2)[0].sum(-1), moe.top_groups)[1]  # (B, T, top_groups)
        among = jax.nn.one_hot(best, moe.num_groups, dtype=bool).any(-2)  # (B, T, groups)
        scores = jnp.where(among[..., None], groups, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, moe.top_k)[1]


def router_losses(logits: Array, chosen: Array, mask: Mask = Mask(), scoring: str = "softmax") -> tuple[Array, Array]:
    """Compute the load-balancing loss and the router z-loss, each (B,): sums over all non-padding tokens of a row.

    For a sequence of n tokens, the load-balancing loss is n E sum_e f_e p_e, where f_e is the fraction of choices that
    fell on expert e and p_e its mean probability (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6). With scoring
    "sigmoid" the probability is the expert's share of the token's scores (arXiv 2412.19437, section 2.1.2). If all
    experts are used equally, the loss is n. The z-loss is the sum of logsumexp(logits)^2, which keeps logits small
    (Zoph et al. 2022, arXiv 2202.08906, equation 5).

    A sequence is a row of the batch, or a segment of the mask, where segment 0 is padding. The loss of a sequence
    therefore does not depend on the other sequences of the batch. Logits are (B, T, E), chosen experts (B, T, k).
    """
    batch, length, experts = logits.shape
    real, number = _sequences(mask, batch, length)
    real = real.astype(jnp.float32)
    # `total` sums over the tokens of each sequence: (B, T, ...) -> (B, sequences of a row, ...).
    total = functools.partial(_sums, number=number)
    share = total(jax.nn.one_hot(chosen, experts).mean(2) * real[:, :, None])  # n f_e
    # sigmoid_e / sum of sigmoids = softmax of the log-sigmoids, which is finite even if all sigmoids round to 0.
    shares = jax.nn.softmax(jax.nn.log_sigmoid(logits) if scoring == "sigmoid" else logits)
    probability = total(shares * real[:, :, None])  # n p_e
    tokens = jnp.maximum(total(real), 1.0)  # n; 1 for a segment that does not exist, to avoid 0 / 0
    balance = (experts * (share * probability).sum(2) / tokens).sum(1)  # E (n f)(n p) / n = n E f p
    return balance, (real * jnp.square(jax.nn.logsumexp(logits, axis=2))).sum(1)


def within_capacity(chosen: Array, mask: Mask = Mask(), *, num_experts: int, factor: float) -> Array:
    """Drop choices (B, T, k) that exceed the capacity of an expert: they become `num_experts`, as those of padding.

    The capacity is `factor` times the even share of an expert in the n k choices of a sequence of n tokens, rounded up
    (Fedus et al. 2021, arXiv 2101.03961, equation 3). There it is that of all tokens of a batch; here each row, or each
    segment of a packed row, is a separate sequence. So neither other sequences nor padding change what is dropped.
    Tokens are served in order: a later token never displaces an earlier one, which keeps a causal model causal. What a
    token gets still depends on the earlier tokens of its sequence, and on the number of all its tokens.
    """
    batch, length, top_k = chosen.shape
    real, number = _sequences(mask, batch, length)
    chosen = jnp.where(real[:, :, None], chosen, num_experts)
    taken = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32).sum(2)  # (B, T, E); 0 for the index num_experts
    before = jnp.cumsum(taken, axis=1) - taken  # choices of each expert by earlier tokens of the row
    sizes = _sums(real.astype(jnp.int32), number)
    if number is None:
        sizes = jnp.broadcast_to(sizes, (batch, length))
    else:
        begins = jnp.diff(number, axis=1, prepend=-1) != 0
        first = jax.lax.cummax(jnp.where(begins, jnp.arange(length)[None, :], 0), axis=1)  # index in the row, (B, T)
        before = before - jnp.take_along_axis(before, first[:, :, None], axis=1)  # ... of the same sequence
        sizes = jnp.take_along_axis(sizes, number, axis=1)
    # A table for every n, computed in float64: rounding must not depend on how many tokens the row has.
    capacity = np.ceil(factor * np.arange(length + 1) * top_k / num_experts).astype(np.int32)
    rank = jnp.take_along_axis(before, jnp.minimum(chosen, num_experts - 1), axis=2)
    return jnp.where(rank < jnp.asarray(capacity)[sizes][:, :, None], chosen, num_experts)


def _sequences(mask: Mask, batch: int, length: int) -> tuple[Array, Array | None]:
    """Return which tokens are real, and the sequence of each token in its row; None: a row is one sequence."""
    real = real_tokens(mask, (batch, length))
    if mask.query_segments is None:
        return real, None
    # Number the segments of a row 0, 1, 2, ... by counting the changes of the segment id.
    begins = jnp.diff(mask.query_segments, axis=1, prepend=mask.query_segments[:, :1]) != 0
    return real, jnp.broadcast_to(jnp.cumsum(begins, axis=1), (batch, length))


def _sums(values: Array, number: Array | None) -> Array:
    """Sum (B, T, ...) over the tokens of each sequence: (B, sequences of a row, ...); 0 for one that does not exist."""
    if number is None:
        return values.sum(1, keepdims=True)
    return jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=values.shape[1]))(values, number)
