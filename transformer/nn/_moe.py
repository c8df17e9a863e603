"""A routed feed-forward (mixture of experts): a router chooses for each token the few experts that it passes through.

Shapes, beside those of axes.py: E experts, k of them for each token, M = B T k copies of tokens. Copies are laid out by
expert in P blocks of Q rows, each block of one expert and filled up with zeros. So the work grows with the number of
copies, whatever E is, and nothing is dropped.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from transformer.config._parts import MoE
from transformer.nn._axes import Array, DType, Hidden
from transformer.nn._layers import FeedForward, Initializer, activate, glorot_uniform, linear
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import constrain, explicit_spec, in_auto_axes, mesh_axes, num_shards, shard_map


class RoutedFeedForward(nn.Module):
    """y = sum over the k likeliest experts e of w_e FeedForward_e(x), with w = softmax(x W_r) of the chosen, made to
    sum to 1 with `moe.normalize_weights` (Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, arXiv 2401.04088),
    plus shared experts that every token passes through (Dai et al. 2024, arXiv 2401.06066). Normalized, w is also the
    softmax over the logits of the chosen alone.

    Parameters: `router/kernel` (D, E) and, as `moe` says, `router/bias` and `router/selection_bias` (E,); `experts/up`,
    `experts/gate` if gated, `experts/down` with `kernel` (E, D, F) or (E, F, D) and, with `use_bias`, `bias`; `shared`,
    a `FeedForward`. F is `width`, that of one expert. The router computes in float32. With a capacity, a copy over it
    is dropped: of the token remain its other experts. `activation` is a name of `ACTIVATIONS` or, gated, of `GATED`.
    `kernel_init` draws the kernel (in, out) of each expert (None: Glorot uniform), except `down` when `output_init` is
    given.
    """

    moe: MoE
    width: int
    activation: str = "relu"
    gated: bool = False
    use_bias: bool = True
    kernel_init: Initializer | None = None
    output_init: Initializer | None = None
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Hidden, mask: Mask = Mask()) -> tuple[Hidden, dict[str, Array]]:
        """(B, T, D) -> (B, T, D) and the losses of the router, (B,) each, times their weights. `mask` tells padding
        and packed sequences, which count in the losses alone.
        """
        moe = self.moe
        logits, chosen, weights = _Router(moe, self.kernel_init, self.param_dtype, name="router")(x)
        balance, z = router_losses(logits, chosen, mask, moe.scoring)
        aux = {"load_balance": moe.load_balance_weight * balance, "router_z": moe.router_z_weight * z}

        if moe.capacity_factor is not None:
            capacity = math.ceil(moe.capacity_factor * x.shape[1] * moe.top_k / moe.num_experts)
            chosen = within_capacity(chosen, moe.num_experts, capacity)
        settings = (self.gated, self.use_bias, self.kernel_init, self.output_init, self.dtype, self.param_dtype)
        experts = _Experts(moe.num_experts, self.width, *settings, name="experts")(x.shape[-1])
        y = _over_devices(x.astype(self.dtype), chosen, weights, experts, moe.num_experts, self.activation)
        if moe.shared_experts:
            shared = FeedForward(moe.shared_experts * self.width, self.activation, *settings, name="shared")
            y = y + shared(x)
        return y, aux


class _Router(nn.Module):
    """Owns the router's parameters; a call gives logits (B, T, E), the chosen (B, T, k) and their weights (B, T, k)."""

    parameter_axes = declare(
        {"router/kernel": "embed -> _", "router/bias": "_", "router/selection_bias": "_"}, role="output"
    )

    moe: MoE
    kernel_init: Initializer | None
    param_dtype: DType

    @nn.compact
    def __call__(self, x: Hidden) -> tuple[Array, Array, Array]:
        moe, experts = self.moe, self.moe.num_experts
        zeros = nn.initializers.zeros
        kernel = self.param("kernel", self.kernel_init or glorot_uniform(), (x.shape[-1], experts), self.param_dtype)
        bias = self.param("bias", zeros, (experts,), self.param_dtype) if moe.router_bias else None
        logits = linear(*nn.dtypes.promote_dtype(x, kernel, bias, dtype=jnp.float32))
        scores = router_scores(logits, moe.scoring)
        chooses = jax.lax.stop_gradient(scores)
        if moe.e_score_correction_bias:
            # float32 whatever the others are: it is large beside the differences between scores.
            selection_bias = self.param("selection_bias", zeros, (experts,), jnp.float32)
            chooses = chooses + jax.lax.stop_gradient(selection_bias)[None, None]
        # Not every compiler can split top_k: one that can't would make the scores of all rows whole.
        names = ("batch", "length", None)
        chosen = in_auto_axes(shard_map(functools.partial(choose, moe), [names], names), explicit_spec(chooses))(
            chooses
        )
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if moe.normalize_weights:
            weights = weights / (weights.sum(-1, keepdims=True) + (1e-20 if moe.scoring == "sigmoid" else 0.0))
        return logits, chosen, weights * moe.routed_scaling_factor


def router_scores(logits: Array, scoring: str) -> Array:
    """softmax(logits), or with scoring "sigmoid" each logit's own (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2):
    (B, T, E) -> (B, T, E).
    """
    return jax.nn.sigmoid(logits) if scoring == "sigmoid" else jax.nn.softmax(logits)


def choose(moe: MoE, scores: Array) -> Array:
    """The `top_k` experts of the highest scores (B, T, E) -> (B, T, k), of equals the first. With groups only those of
    the `top_groups` whose two best together are highest (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2).
    """
    if moe.top_groups < moe.num_groups:
        groups = scores.reshape(*scores.shape[:-1], moe.num_groups, -1)
        best = jax.lax.top_k(jax.lax.top_k(groups, 2)[0].sum(-1), moe.top_groups)[1]
        among = jax.nn.one_hot(best, moe.num_groups, dtype=bool).any(-2)
        scores = jnp.where(among[..., None], groups, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, moe.top_k)[1]


class _Experts(nn.Module):
    """Owns the experts' parameters; a call gives them as a tree, in `dtype`."""

    parameter_axes = declare(
        {
            "experts/up/kernel": "expert: embed -> feed_forward",
            "experts/up/bias": "expert feed_forward",
            "experts/gate/kernel": "expert: embed -> feed_forward",
            "experts/gate/bias": "expert feed_forward",
            "experts/down/kernel": "expert: feed_forward -> embed",
            "experts/down/bias": "expert embed",
        },
        int8=False,
    )

    num_experts: int
    width: int
    gated: bool
    use_bias: bool
    kernel_init: Initializer | None
    output_init: Initializer | None
    dtype: DType
    param_dtype: DType

    @nn.compact
    def __call__(self, features: int) -> dict[str, Any]:
        def project(name, inner, out, init):
            shape = (self.num_experts, inner, out)
            return _Projection(shape, self.use_bias, init, self.dtype, self.param_dtype, name=name)()

        into = ("up", "gate") if self.gated else ("up",)
        experts = {name: project(name, features, self.width, self.kernel_init) for name in into}
        return experts | {"down": project("down", self.width, features, self.output_init or self.kernel_init)}


class _Projection(nn.Module):
    """The same linear map in each expert: `kernel` (E, in, out) and `bias` (E, out)."""

    shape: tuple[int, int, int]
    use_bias: bool
    kernel_init: Initializer | None
    dtype: DType
    param_dtype: DType

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        one = self.kernel_init or glorot_uniform()

        def each(key, shape, dtype):
            kernels = jax.vmap(lambda key: one(key, shape[1:], dtype))(jax.random.split(key, shape[0]))
            return nn.meta.add_axis(kernels, 0, {nn.PARTITION_NAME: None})  # of boxes, whose names are of (in, out)

        kernel = self.param("kernel", each, self.shape, self.param_dtype)
        params = {"kernel": kernel.astype(self.dtype)}
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.shape[0], self.shape[2]), self.param_dtype)
            params["bias"] = bias.astype(self.dtype)
        return params


def router_losses(logits: Array, chosen: Array, mask: Mask = Mask(), scoring: str = "softmax") -> tuple[Array, Array]:
    """Load balance and router z loss of logits (B, T, E) and choices (B, T, k), each (B,): sums over the real tokens.

    For a sequence of n tokens: n E sum_e f_e p_e with f_e the share of choices that fell on expert e and p_e its mean
    probability (Fedus et al. 2021, arXiv 2101.03961, section 2.2; with scoring "sigmoid" its share of a token's scores,
    arXiv 2412.19437, section 2.1.2), which is n where all are alike; and the sum of
    logsumexp(logits)^2 (Zoph et al. 2022, arXiv 2202.08906, section 3). Sequences are the rows, or the segments of the
    mask, of which 0 is padding: what else is in the batch changes nothing.
    """
    batch, length, experts = logits.shape
    real = jnp.ones((batch, length), jnp.float32)
    if mask.key_lengths is not None:
        real = real * (jnp.arange(length)[None, :] < mask.key_lengths[:, None])
    if mask.query_segments is not None:
        real = real * (mask.query_segments != 0)
    # From here on the sequences of a row stand in axis 1, of which most are empty where rows are not packed.
    if mask.query_segments is None:
        total = functools.partial(jnp.sum, axis=1, keepdims=True)
    else:
        begins = jnp.diff(mask.query_segments, axis=1, prepend=mask.query_segments[:, :1]) != 0
        number = jnp.broadcast_to(jnp.cumsum(begins, axis=1), (batch, length))
        total = jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=length))
        total = functools.partial(total, segment_ids=number)
    share = total(jax.nn.one_hot(chosen, experts).mean(2) * real[:, :, None])
    # Shares of sigmoids are a softmax of their logarithms, which holds where all of them round to 0.
    shares = jax.nn.softmax(jax.nn.log_sigmoid(logits) if scoring == "sigmoid" else logits)
    probability = total(shares * real[:, :, None])
    tokens = jnp.maximum(total(real), 1.0)
    balance = (experts * (share * probability).sum(2) / tokens).sum(1)
    return balance, (real * jnp.square(jax.nn.logsumexp(logits, axis=2))).sum(1)


def within_capacity(chosen: Array, num_experts: int, capacity: int) -> Array:
    """Choices (B, T, k), with `num_experts` (no expert) in place of those over an expert's `capacity` in their row.

    Tokens are served in their order, so that a later one never takes the place of an earlier one, which also keeps a
    causal model causal (Fedus et al. 2021, arXiv 2101.03961, section 2.2, by row instead of by batch).
    """
    batch = chosen.shape[0]
    turn = _turns(chosen.reshape(batch, -1), num_experts).reshape(chosen.shape)
    return jnp.where(turn < capacity, chosen, num_experts)


def _turns(expert: Array, num_experts: int) -> Array:
    """How many before it in its row went to the same expert: (B, M) -> (B, M); 0 for no expert."""
    taken = jax.nn.one_hot(expert, num_experts, dtype=jnp.int32)
    return ((jnp.cumsum(taken, axis=1) - 1) * taken).sum(-1)


def _over_devices(x: Array, chosen: Array, weights: Array, experts: Any, num_experts: int, activation: str) -> Array:
    """`routed` on each device for its own rows. Experts that are spread over mesh axes stay where they are: tokens are
    gathered along these axes, each device computes with its experts, and the results are summed back.
    """
    if (spec := explicit_spec(x)) is not None:
        over = functools.partial(_over_devices, num_experts=num_experts, activation=activation)
        return in_auto_axes(over, PartitionSpec(*spec[:2], None))(x, chosen, weights, experts)
    rows, shared = mesh_axes("batch"), mesh_axes("expert")
    if not rows or x.shape[0] % num_shards("batch"):
        return routed(x, chosen, weights, experts, num_experts, activation)
    spread = bool(shared) and set(shared) <= set(rows) and num_experts % num_shards("expert") == 0

    def local(x, chosen, weights, experts):
        if not spread:
            return routed(x, chosen, weights, experts, num_experts, activation)
        gather = functools.partial(jax.lax.all_gather, axis_name=shared, axis=0, tiled=True)
        first = jax.lax.axis_index(shared) * experts["up"]["kernel"].shape[0]
        y = routed(gather(x), gather(chosen) - first, gather(weights), experts, num_experts, activation)
        return jax.lax.psum_scatter(y, shared, scatter_dimension=0, tiled=True)

    own, theirs = PartitionSpec(rows), PartitionSpec(shared if spread else None)
    specs = (own, own, own, jax.tree.map(lambda _: theirs, experts))
    return jax.shard_map(local, in_specs=specs, out_specs=own, axis_names=set(rows), check_vma=False)(
        x, chosen, weights, experts
    )


def routed(x: Array, chosen: Array, weights: Array, experts: Any, num_experts: int, activation: str) -> Array:
    """x (B, T, D) through its chosen experts (B, T, k), summed by weights (B, T, k) -> (B, T, D); Shazeer et al. 2017,
    arXiv 1701.06538, section 2.

    `experts` is a tree of parameters: of `num_experts` experts in all, those numbered from 0 on that are here. A choice
    of another adds nothing.
    """
    batch, length, features = x.shape
    here = experts["up"]["kernel"].shape[0]
    expert = chosen.reshape(-1)
    expert = jnp.where((expert >= 0) & (expert < here), expert, here)
    copies = expert.shape[0]
    # A block of an eighth of an even share: an expert's last block is half empty on average, 1 / 16 of the work.
    rows = max(1, copies // (8 * num_experts))
    blocks = (copies + min(here, copies) * (rows - 1)) // rows

    sizes = (expert[:, None] == jnp.arange(here)[None, :]).sum(0)
    ends = jnp.cumsum(-(-sizes // rows))
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])  # the last one: behind all blocks that are used
    slot = jnp.where(expert < here, starts[expert] * rows + _turns(expert[None], here)[0], blocks * rows)
    expert_of_block = jnp.searchsorted(ends, jnp.arange(blocks), side="right").clip(0, here - 1)

    def project(name, hidden):
        kernel, bias = experts[name]["kernel"], experts[name].get("bias")
        y = grouped_linear(hidden, kernel, expert_of_block, ends[-1])
        return y if bias is None else y + bias[expert_of_block][:, None]

    each = jnp.broadcast_to(x[:, :, None], (batch, length, chosen.shape[-1], features)).reshape(copies, features)
    laid_out = jnp.zeros((blocks * rows, features), x.dtype).at[slot].set(each, mode="drop")
    laid_out = laid_out.reshape(blocks, rows, features)
    gate = project("gate", laid_out) if "gate" in experts else None
    hidden = activate(activation, project("up", laid_out), gate)
    hidden = constrain(hidden, None, None, "feed_forward")
    hidden = checkpoint_name(hidden, "feed_forward_hidden")
    y = project("down", hidden).reshape(blocks * rows, features)
    each = y.at[slot].get(mode="fill", fill_value=0).reshape(*chosen.shape, features)
    return (each * weights[..., None]).sum(2).astype(x.dtype)


# A slice read and a slice written: `x[i]` and `x.at[i].set` would be a gather and a scatter, which take much longer.
_at = functools.partial(jax.lax.dynamic_index_in_dim, axis=0, keepdims=False)
_put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)


@jax.custom_vjp
def grouped_linear(x: Array, kernel: Array, expert: Array, used: Array) -> Array:
    """Each block of x (P, Q, in) times the kernel (E, in, out) of its expert (P,) -> (P, Q, out); zeros from block
    `used` () on. A loop over the blocks that are used (Gale et al. 2022, arXiv 2211.15841, has them as a kernel).
    """

    def step(i, y):
        return _put(y, _at(x, i) @ _at(kernel, _at(expert, i)), i)

    return jax.lax.fori_loop(0, used, step, jnp.zeros((*x.shape[:2], kernel.shape[2]), x.dtype))


def _forward(x, kernel, expert, used):
    return grouped_linear(x, kernel, expert, used), (x, kernel, expert, used)


def _backward(saved, dy):
    # By hand: the derivative that JAX makes of `kernel[expert[i]]` is as large as all experts, in every step.
    x, kernel, expert, used = saved

    def step(i, gradients):
        dx, dkernel = gradients
        e, dy_block = _at(expert, i), _at(dy, i)
        product = jnp.matmul(_at(x, i).T, dy_block, preferred_element_type=jnp.float32)
        return _put(dx, dy_block @ _at(kernel, e).T, i), _put(dkernel, _at(dkernel, e) + product, e)

    zeros = jnp.zeros(x.shape, x.dtype), jnp.zeros(kernel.shape, jnp.float32)
    dx, dkernel = jax.lax.fori_loop(0, used, step, zeros)
    return dx, dkernel.astype(kernel.dtype), None, None


grouped_linear.defvjp(_forward, _backward)
