"""Mixture of experts (MoE): a feed-forward layer in which a router selects a few experts for each token.

Shapes in addition to those of `_axes.py`: E experts, of which each token is sent to k; M = B T k copies of tokens.
Copies are sorted by expert: into P blocks of Q rows, where all rows of a block belong to one expert and unused rows are
zero, or, for the kernels of `_grouped.py`, into R rows without padding between the experts. The work therefore grows
with the number of copies, for any E, and only a capacity can drop tokens, in training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from transformer.config._parts import MoE
from transformer.nn._axes import Array, DType, Hidden, PyTree
from transformer.nn._grouped import GROUPED, Call, choose_experts, collect, dispatch, padded_rows, tile_rows
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import (
    auto_axes,
    constrain,
    explicit_spec,
    fsdp_axes,
    in_auto_axes,
    mesh_axes,
    num_shards,
    platform,
)
from transformer.nn._router import Router, router_losses, within_capacity
from transformer.nn.layers._layers import FeedForward, Initializer, Linear, activate, glorot_uniform
from transformer.nn.quantization._adapted import dense, kernel_parameter
from transformer.nn.quantization._schemes import Quantization, Scheme, multiply, quantized

ExpertParams: TypeAlias = dict[str, dict[str, Array]]
"""parameters of the experts of a device: up, down and gate -> `kernel` (e, in, out) and `bias` (e, out)"""


class RoutedFeedForward(nn.Module):
    """y = sum of w_e FeedForward_e(x) over the k experts e with the highest scores (Shazeer et al. 2017).

    w is softmax(x W_r), or sigmoid(x W_r) with `moe.scoring`, restricted to the selected experts. With
    `moe.normalize_weights` it is divided by its sum; the softmax weights then equal the softmax over the logits of the
    selected experts (Jiang et al. 2024, arXiv 2401.04088). Shared experts, through which every token passes, are added
    (Dai et al. 2024, arXiv 2401.06066). In training with a capacity, a copy of a token that exceeds the capacity of an
    expert is dropped; the token keeps its others (`within_capacity`). `moe.scale_inputs` means FeedForward_e(w_e x).

    Parameters: `router/`; `experts/up`, `experts/gate` if gated, and `experts/down`, with `kernel` (E, D, F) or (E, F,
    D) and, with `use_bias`, a `bias`; `shared`, a `FeedForward`, and `shared_gate/kernel` (D, 1), depending on `moe`. F
    is `width`, the width of one expert. The other fields are those of `FeedForward`; each expert is initialized on its
    own, and the router is never quantized. `implementation` of the multiplications: `blockwise`, `ragged`, `megablox`,
    or `auto` (`choose_experts`).
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
    quantization: Quantization | None = None
    implementation: str = "auto"
    norm_epsilon: float = 1e-6  # epsilon of `moe.router_norm`

    @nn.compact
    def __call__(
        self, x: Hidden, mask: Mask = Mask(), router_input: Hidden | None = None, deterministic: bool = True
    ) -> tuple[Hidden, dict[str, Array]]:
        """Apply the layer to x (B, T, D); the router reads `router_input` (B, T, D), or x if it is None.

        The mask marks padding and packed sequences, for the losses and for the capacity. Without `deterministic`, in
        training, choices that exceed `moe.capacity_factor` are dropped; evaluation and decoding drop nothing.

        Returns y (B, T, D), and the losses of the router, (B,) each, multiplied by their weights. Raises ConfigError if
        `implementation` does not support this call.
        """
        moe = self.moe
        router = Router(moe, self.kernel_init, self.param_dtype, self.norm_epsilon, name="router")
        logits, chosen, weights = router(x if router_input is None else router_input)
        balance, z = router_losses(logits, chosen, mask, moe.scoring)
        aux = {"load_balance": moe.load_balance_weight * balance, "router_z": moe.router_z_weight * z}

        if moe.capacity_factor is not None and not deterministic:
            limited = functools.partial(within_capacity, num_experts=moe.num_experts, factor=moe.capacity_factor)
            chosen = in_auto_axes(limited, explicit_spec(chosen))(chosen, mask)
        settings = (self.gated, self.use_bias, self.kernel_init, self.output_init, self.dtype, self.param_dtype)
        experts = _Experts(moe.num_experts, self.width, *settings, name="experts")(x.shape[-1])
        schemes = self._schemes(experts)
        call = Call(chosen.size, moe.num_experts, jnp.dtype(self.dtype), bool(schemes))
        run = functools.partial(
            routed,
            num_experts=moe.num_experts,
            activation=self.activation,
            scale_inputs=moe.scale_inputs,
            schemes=schemes,
            implementation=choose_experts(self.implementation, call),
        )
        y = _over_devices(run, x.astype(self.dtype), chosen, weights, experts, moe.num_experts)
        if moe.shared_experts:
            settings = (*settings, self.quantization)
            width = moe.shared_experts * (moe.shared_d_ff or self.width)
            shared = FeedForward(width, self.activation, *settings, name="shared")(x)
            if moe.shared_gate:
                gate = Linear((1,), 1, False, self.kernel_init, self.dtype, self.param_dtype, name="shared_gate")
                shared = shared * jax.nn.sigmoid(gate(x))
            y = y + shared
        return y, aux

    def _schemes(self, experts: ExpertParams) -> dict[str, Scheme]:
        if self.quantization is None:
            return {}
        schemes = {name: self.quantization.at(*self.path, "experts", name, "kernel") for name in experts}
        return {name: scheme for name, scheme in schemes.items() if scheme is not None}


class _Experts(nn.Module):
    """Owns the parameters of the experts; calling it returns them as a tree, in `dtype`."""

    parameter_axes = declare(
        dict.fromkeys(("experts/up/kernel", "experts/gate/kernel"), "expert: embed -> feed_forward")
        | dict.fromkeys(("experts/up/bias", "experts/gate/bias"), "expert feed_forward")
        | {"experts/down/kernel": "expert: feed_forward -> embed", "experts/down/bias": "expert embed"},
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
    def __call__(self, features: int) -> ExpertParams:
        def project(name, inner, out, init):
            shape = (self.num_experts, inner, out)
            return _Projection(shape, self.use_bias, init, self.dtype, self.param_dtype, name=name)()

        into = ("up", "gate") if self.gated else ("up",)
        experts = {name: project(name, features, self.width, self.kernel_init) for name in into}
        return experts | {"down": project("down", self.width, features, self.output_init or self.kernel_init)}


class _Projection(nn.Module):
    """One linear map per expert: `kernel` (E, in, out) and `bias` (E, out)."""

    shape: tuple[int, int, int]
    use_bias: bool
    kernel_init: Initializer | None
    dtype: DType
    param_dtype: DType

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        one = self.kernel_init or glorot_uniform()

        def each(key, shape, dtype):
            # A separate key per expert, and fan-in and fan-out of one expert rather than of all of them.
            kernels = jax.vmap(lambda key: one(key, shape[1:], dtype))(jax.random.split(key, shape[0]))
            # For parameters in boxes, whose names are those of (in, out): add a name for the axis of experts.
            return nn.meta.add_axis(kernels, 0, {nn.PARTITION_NAME: None})

        params = {"kernel": dense(kernel_parameter(self, each, self.shape, self.param_dtype), self.dtype)}
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.shape[0], self.shape[2]), self.param_dtype)
            params["bias"] = bias.astype(self.dtype)
        return params


def _ranks(expert: Array, num_experts: int) -> Array:
    """Count the earlier entries of the row with the same expert: (B, M) -> (B, M); 0 for an entry without an expert."""
    taken = jax.nn.one_hot(expert, num_experts, dtype=jnp.int32)  # (B, M, E); all 0 for the index num_experts
    return ((jnp.cumsum(taken, axis=1) - 1) * taken).sum(-1)


def _over_devices(
    run: Callable[..., Array], x: Array, chosen: Array, weights: Array, experts: ExpertParams, num_experts: int
) -> Array:
    """Run `routed`, with options in `run`, on each device for its own rows."""
    # Experts that are sharded over mesh axes stay on their devices. Tokens are all-gathered along these axes, each
    # device applies its experts to them, and a reduce-scatter sums the results and returns them to the devices of their
    # rows.
    if (spec := explicit_spec(x)) is not None:
        over = functools.partial(_over_devices, run, num_experts=num_experts)
        return in_auto_axes(over, PartitionSpec(*spec[:2], None))(x, chosen, weights, experts)
    rows, shared = mesh_axes("batch"), mesh_axes("expert")
    # If devices share all rows, the compiler would gather the experts instead of summing the outputs.
    if auto_axes() and (run.keywords["implementation"] in GROUPED or (shared and not rows)):
        return _over_all_axes(run, x, chosen, weights, experts, num_experts)
    if not rows or x.shape[0] % num_shards("batch"):
        return run(x, chosen, weights, experts)
    spread = bool(shared) and set(shared) <= set(rows) and num_experts % num_shards("expert") == 0

    def local(x, chosen, weights, experts):
        if not spread:
            return run(x, chosen, weights, experts)
        gather = functools.partial(jax.lax.all_gather, axis_name=shared, axis=0, tiled=True)
        # Number the experts of this device from 0. Choices of experts on other devices are then out of range.
        first = jax.lax.axis_index(shared) * experts["up"]["kernel"].shape[0]
        y = run(gather(x), gather(chosen) - first, gather(weights), experts)
        return jax.lax.psum_scatter(y, shared, scatter_dimension=0, tiled=True)

    own, theirs = PartitionSpec(rows), PartitionSpec(shared if spread else None)
    specs = (own, own, own, jax.tree.map(lambda _: theirs, experts))
    return jax.shard_map(local, in_specs=specs, out_specs=own, axis_names=set(rows), check_vma=False)(
        x, chosen, weights, experts
    )


class _Split(NamedTuple):
    """Mesh axes that split the arrays of a layer of experts."""

    rows: tuple[str, ...]  # those of the rows B of the batch
    length: tuple[str, ...]  # those of the length T
    shared: tuple[str, ...]  # those of the experts E
    hidden: tuple[str, ...]  # those of the hidden features F
    stored: tuple[str, ...]  # those over which kernels are stored (fsdp); they are gathered for the computation

    @property
    def gathers_tokens(self) -> bool:
        """Whether devices with different experts have different tokens."""
        return bool(self.shared) and set(self.shared) <= set(self.rows)


def _split(x: Array, experts: ExpertParams, num_experts: int) -> _Split:
    """Return the axes that split x (B, T, D) and the experts; none for a size that is not divisible."""

    def axes(name, size):
        return mesh_axes(name) if size % num_shards(name) == 0 else ()

    rows, length, shared = axes("batch", x.shape[0]), axes("length", x.shape[1]), axes("expert", num_experts)
    # Every device must have the tokens of all its experts: gathered from the devices of its rows, or never split.
    if not set(shared) <= set(rows) and set(shared) & {*rows, *length}:
        shared = ()
    hidden = axes("feed_forward", experts["up"]["kernel"].shape[2])
    stored = tuple(axis for axis in fsdp_axes(x.shape[2]) if axis not in (*shared, *hidden))
    return _Split(rows, length, shared, hidden, stored)


def _over_all_axes(
    run: Callable[..., Array], x: Array, chosen: Array, weights: Array, experts: ExpertParams, num_experts: int
) -> Array:
    """Run `routed` on each device for its own tokens, its own experts and its own part of their hidden features."""
    # For kernels, which the compiler can't partition. As in `_over_devices`, tokens are gathered along the axes of
    # experts. The parts of the hidden features are summed after the experts' outputs, which are k times as many.
    split = _split(x, experts, num_experts)
    rows, length, each, hidden, stored = (axes or None for axes in split)
    own = PartitionSpec(rows, length)
    into = {"kernel": PartitionSpec(each, stored, hidden), "bias": PartitionSpec(each, hidden)}
    out = {"kernel": PartitionSpec(each, hidden, stored), "bias": PartitionSpec(each, None)}
    specs = {name: {part: (out if name == "down" else into)[part] for part in one} for name, one in experts.items()}

    def local(x, chosen, weights, experts):
        experts = _own_experts(experts, split)
        gather = functools.partial(jax.lax.all_gather, axis_name=split.shared, axis=0, tiled=True)
        if split.gathers_tokens:
            x, chosen, weights = gather(x), gather(chosen), gather(weights)
        if split.shared:  # number the experts of this device from 0
            chosen = chosen - jax.lax.axis_index(split.shared) * experts["up"]["kernel"].shape[0]
        y = run(x, chosen, weights, experts)
        over = split.hidden if split.gathers_tokens else (*split.hidden, *split.shared)
        y = jax.lax.psum(y, over) if over else y
        if split.gathers_tokens:
            y = jax.lax.psum_scatter(y, split.shared, scatter_dimension=0, tiled=True)
        return y

    specs = {"in_specs": (own, own, own, specs), "out_specs": own}
    return jax.shard_map(local, **specs, axis_names=auto_axes(), check_vma=False)(x, chosen, weights, experts)


def _own_experts(experts: ExpertParams, split: _Split) -> ExpertParams:
    """Return the experts with which a device computes, from the parts that it stores, inside `shard_map`."""
    if split.stored:
        # The derivative of this gather is a reduce-scatter. Without it, the step of Mixtral 8x7B on 64 chips needs
        # 0.9 GiB more per chip, for derivatives as large as the gathered kernels.
        gather = functools.partial(jax.lax.all_gather, axis_name=split.stored, tiled=True)
        axis = {name: 2 if name == "down" else 1 for name in experts}  # the axis of D
        experts = {name: one | {"kernel": gather(one["kernel"], axis=axis[name])} for name, one in experts.items()}
    if split.hidden and "bias" in experts["down"]:  # the sum over the hidden features must contain the bias once
        bias = jnp.where(jax.lax.axis_index(split.hidden) == 0, experts["down"]["bias"], 0)
        experts = experts | {"down": experts["down"] | {"bias": bias}}
    return experts


def routed(
    x: Array,
    chosen: Array,
    weights: Array,
    experts: ExpertParams,
    num_experts: int,
    activation: str,
    scale_inputs: bool = False,
    schemes: Mapping[str, Scheme] = MappingProxyType({}),
    implementation: str = "blockwise",
) -> Array:
    """Send x (B, T, D) through its selected experts (B, T, k) and sum the outputs by weights (B, T, k) -> (B, T, D).

    This is equation 1 of Shazeer et al. 2017, arXiv 1701.06538, section 2. Instead of computing all E experts, copies
    of tokens are sorted by expert, and each copy is multiplied by the kernels of its expert. `experts` are those of
    this device, numbered from 0: choices of others contribute nothing; `num_experts` are those of all devices. With
    `scale_inputs`, the weights multiply the inputs of the experts instead of their outputs. `schemes` are those of the
    kernels of `up`, `gate` or `down`.
    """
    num_local = experts["up"]["kernel"].shape[0]
    expert = chosen.reshape(-1)  # (M,)
    expert = jnp.where((expert >= 0) & (expert < num_local), expert, num_local)  # num_local: no local expert
    if scale_inputs:  # (B, T, D) x (B, T, k) -> (B, T k, D): each copy is a token of its own
        x = (x[:, :, None] * weights[..., None]).astype(x.dtype).reshape(x.shape[0], -1, x.shape[-1])
    if implementation == "blockwise":
        layout = _blocks(x, expert, experts, num_experts, schemes)
    else:
        layout = _rows(x, expert, experts, num_experts, implementation)
    gate = layout.project("gate", layout.copies) if "gate" in experts else None
    hidden = activate(activation, layout.project("up", layout.copies), gate)  # (P, Q, F) or (R, F)
    hidden = constrain(hidden, *(None,) * (hidden.ndim - 1), "feed_forward")
    hidden = checkpoint_name(hidden, "feed_forward_hidden")
    each = layout.collect(layout.project("down", hidden)).reshape(*chosen.shape, x.shape[-1])  # (B, T, k, D)
    if scale_inputs:
        return each.sum(2).astype(x.dtype)
    return (each * weights[..., None]).sum(2).astype(x.dtype)  # sum of w_e FeedForward_e(x), in float32 like w


class _Layout(NamedTuple):
    """Copies of tokens in the order of their experts, and what to do with them."""

    copies: Array
    """(P, Q, D) or (R, D)"""
    project: Callable[[str, Array], Array]
    """(name of a projection, (..., in)) -> (..., out)"""
    collect: Callable[[Array], Array]
    """results (..., D) -> (M, D), in the order of the tokens; zeros for a copy without a local expert"""


def _blocks(x: Array, expert: Array, experts: ExpertParams, num_experts: int, schemes: Mapping[str, Scheme]) -> _Layout:
    """Arrange the copies of x (B, T, D) with these experts (M,) in blocks (P, Q, D), for `grouped_linear`."""
    batch, length, features = x.shape
    num_local, copies = experts["up"]["kernel"].shape[0], expert.shape[0]
    # Q is 1/8 of an even share M / E. The last block of an expert is half empty on average: 1/16 more work.
    rows = max(1, copies // (8 * num_experts))
    # P = sum of ceil(n_e / Q) depends on the data, but a shape can't: allocate for its largest value.
    blocks = (copies + min(num_local, copies) * (rows - 1)) // rows

    sizes = (expert[:, None] == jnp.arange(num_local)[None, :]).sum(0)  # n_e, copies per expert
    ends = jnp.cumsum(-(-sizes // rows))  # expert e has the blocks starts[e], ..., ends[e] - 1
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])  # the last entry is the number of used blocks
    # Row of each copy: after the earlier copies of its expert. Copies without a local expert get a row out of range.
    rank = _ranks(expert[None], num_local).squeeze(0)
    slot = jnp.where(expert < num_local, starts[expert] * rows + rank, blocks * rows)
    expert_of_block = jnp.searchsorted(ends, jnp.arange(blocks), side="right").clip(0, num_local - 1)

    def project(name, hidden):
        kernel, bias = experts[name]["kernel"], experts[name].get("bias")
        y = grouped_linear(hidden, kernel, expert_of_block, ends[-1], schemes.get(name))
        return y if bias is None else y + bias[expert_of_block][:, None]

    def collect(y):
        return y.reshape(blocks * rows, features).at[slot].get(mode="fill", fill_value=0)

    # Scatter copies to their rows; "drop" ignores rows out of range.
    each = jnp.broadcast_to(x[:, :, None], (batch, length, copies // (batch * length), features))
    grouped = jnp.zeros((blocks * rows, features), x.dtype).at[slot].set(each.reshape(copies, features), mode="drop")
    return _Layout(grouped.reshape(blocks, rows, features), project, collect)


def _rows(x: Array, expert: Array, experts: ExpertParams, num_experts: int, implementation: str) -> _Layout:
    """Arrange the copies of x (B, T, D) with these experts (M,) in rows (R, D); those of no local expert are last."""
    num_local, copies = experts["up"]["kernel"].shape[0], expert.shape[0]
    tile = tile_rows(copies, num_experts) if platform() == "tpu" or implementation == "megablox" else None
    rows = padded_rows(copies, tile)
    sizes = (expert[:, None] == jnp.arange(num_local)[None, :]).sum(0, dtype=jnp.int32)  # n_e, copies per expert
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)])  # the last entry is their sum
    row_of_copy = jnp.where(expert < num_local, starts[expert] + _ranks(expert[None], num_local).squeeze(0), rows)
    copy_of_row = jnp.pad(jnp.argsort(expert, stable=True), (0, rows - copies))
    # Rows of no group get a zero bias, and give it no gradient.
    expert_of_row = jnp.where(jnp.arange(rows) < starts[-1], expert[copy_of_row], num_local)

    def project(name, hidden):
        kernel, bias = experts[name]["kernel"], experts[name].get("bias")
        y = GROUPED[implementation](hidden, kernel, sizes, tile)
        return y if bias is None else y + bias.at[expert_of_row].get(mode="fill", fill_value=0)

    tokens = x.reshape(-1, x.shape[-1])
    return _Layout(dispatch(tokens, copy_of_row, row_of_copy), project, lambda y: collect(y, copy_of_row, row_of_copy))


# Read and write one slice: `x[i]` and `x.at[i].set` would compile to a gather and a scatter, which are much slower.
_put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)


def _at(arrays: PyTree, i: Array) -> PyTree:
    """Return slice i of an array, or of a quantized array: of its integers and of its scales."""
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, i, axis=0, keepdims=False), arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def grouped_linear(x: Array, kernel: Array, expert: Array, used: Array, scheme: Scheme | None = None) -> Array:
    """Multiply each block of x (P, Q, in) by the kernel (E, in, out) of its expert (P,) -> (P, Q, out).

    Only the first `used` () blocks are computed, in a loop; the others are zero. Gale et al. 2022, arXiv 2211.15841,
    describe the same computation as one kernel. The factors are quantized by `scheme`, before the loop, because a
    kernel serves several blocks; the derivatives are those of `quantized_linear`.
    """
    dtype = None if scheme is None else scheme.dtype
    rows, kernels = quantized(x, (2,), dtype), quantized(kernel, (1,), dtype)

    def step(i, y):
        # (Q, in) @ (in, out)
        return _put(y, multiply(_at(rows, i), _at(kernels, _at(expert, i)), (1,), (0,), x.dtype), i)

    return jax.lax.fori_loop(0, used, step, jnp.zeros((*x.shape[:2], kernel.shape[2]), x.dtype))


def _backward(scheme, saved, dy):
    # By hand, because JAX can't differentiate a loop whose length is an array in reverse mode. A loop of fixed length
    # would not do either: the derivative of `kernel[expert[i]]` is an array as large as all experts, in every step.
    x, kernel, expert, used = saved
    gradient_dtype = None if scheme is None else scheme.gradient_dtype
    dtype = None if gradient_dtype is None else scheme.dtype
    rows, kernels = quantized(dy, (2,), gradient_dtype), quantized(kernel, (2,), dtype)  # for dx, sums over out
    inputs, outputs = quantized(x, (1,), dtype), quantized(dy, (1,), gradient_dtype)  # for dW, sums over a block

    def step(i, gradients):
        dx, dkernel = gradients
        e = _at(expert, i)
        # dx = dy W^T; dW is summed over all blocks of the expert, in float32 because these may be many.
        dx = _put(dx, multiply(_at(rows, i), _at(kernels, e), (1,), (1,), x.dtype), i)
        product = multiply(_at(inputs, i), _at(outputs, i), (0,), (0,), jnp.float32)
        return dx, _put(dkernel, _at(dkernel, e) + product, e)

    zeros = jnp.zeros(x.shape, x.dtype), jnp.zeros(kernel.shape, jnp.float32)
    dx, dkernel = jax.lax.fori_loop(0, used, step, zeros)
    return dx, dkernel.astype(kernel.dtype), None, None


grouped_linear.defvjp(lambda *given: (grouped_linear(*given), given[:4]), _backward)  # saves the arrays
