"""Blockwise attention with a running (online) softmax. Memory is linear in the length; masked blocks are skipped.

This is FlashAttention (Dao et al. 2022, arXiv 2205.14135) in plain JAX, so it runs on every platform. With scores S,
the formulas for one query are

    m = max_s S_s             l = sum_s exp(S_s - m)        O = sum_s exp(S_s - m) V_s / l
    L = m + log l             P_s = exp(S_s - L)            (the softmax weights)

The forward pass computes m, l and O block by block and stores only O and the logsumexp L, one number per query, as in
FlashAttention-2 (Dao 2023, arXiv 2307.08691). The backward pass recomputes each block of weights P from S and L.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Attended, Key, PRNGKey, PyTree, Query, Value
from transformer.nn._masks import Mask
from transformer.nn.kernels._contract import AttentionSpec, bias_block

BLOCK = 128
"""queries per block and keys per block: on CPU a block of scores then fits in cache, on TPU it fills the matrix unit"""


def blockwise_attention(
    query: Query, key: Key, value: Value, spec: AttentionSpec, block: int = BLOCK
) -> tuple[Attended, None]:
    """Compute attention in blocks of `block` queries by `block` keys (Dao et al. 2022, arXiv 2205.14135, section 3).

    The other arguments are those of `dot_product_attention`. Dropout uses one key per block, so its pattern differs
    from the pattern of the reference kernel for the same key.

    Returns:
        The output (B, T, N, Hv), and None for the weights.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, kv_heads, value_dim = value.shape[1:]
    block = min(block, max(num_queries, num_keys))

    # A block of scores must be a pure function of its inputs. The arrays that the bias function closes over (such as a
    # learned table) become explicit arguments, so that they get gradients: jax.custom_vjp below does not differentiate
    # values that a function closes over, and rejects traced ones.
    bias_arrays: list[jax.Array] = []
    evaluate = None
    if spec.bias is not None:
        index = jax.ShapeDtypeStruct((block,), jnp.int32)
        closed = jax.make_jaxpr(functools.partial(bias_block, spec.bias))(index, index)
        bias_arrays, evaluate = [jnp.asarray(const) for const in closed.consts], _evaluate(closed.jaxpr)
    plan = Blocks(spec, num_queries, num_keys, block, evaluate)

    # (B, T, N, H) -> (B, T, K, G, H): G query heads share a key head.
    grouped = query.reshape(batch, num_queries, kv_heads, num_heads // kv_heads, head_dim)
    sinks = None if spec.sinks is None else spec.sinks.astype(jnp.float32).reshape(kv_heads, -1)
    out = _blockwise(plan, grouped, key, value, bias_arrays, sinks, spec.mask, spec.dropout_key)
    return out.reshape(batch, num_queries, num_heads, value_dim).astype(value.dtype), None


def _evaluate(jaxpr) -> Callable:
    return lambda consts, *arguments: jax.core.eval_jaxpr(jaxpr, consts, *arguments)[0]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Static properties of a blockwise call, and operations on blocks (Dao et al. 2022, arXiv 2205.14135, section 3).

    `num_queries` T and `num_keys` S are divided into blocks of `block` positions. The arrays of the spec are arguments
    of the forward and backward pass, not fields of this class.
    """

    spec: AttentionSpec
    num_queries: int
    num_keys: int
    block: int
    bias: Callable | None = None
    """(arrays of the bias, query indices, key indices) -> the bias of that block; None: no bias"""

    def __post_init__(self):
        # The plan is a static argument of custom_vjp and may outlive a trace, so it must not hold traced arrays.
        static = dataclasses.replace(self.spec, mask=Mask(), bias=None, sinks=None, dropout_key=None)
        object.__setattr__(self, "spec", static)

    @property
    def query_blocks(self) -> int:
        """Number of query blocks; the last one may be padded."""
        return math.ceil(self.num_queries / self.block)

    @property
    def key_blocks(self) -> int:
        """Number of key blocks; the last one may be padded."""
        return math.ceil(self.num_keys / self.block)

    def indices(self, i: Array) -> Array:
        """Return the indices (t,) of the positions in block i, a scalar."""
        return i * self.block + jnp.arange(self.block)

    def scores(self, query: Array, key: Array, bias_arrays: list[Array], i: Array, j: Array) -> Array:
        """Compute the scores of query block i and key block j before the mask, (B, K, G, t, s), in float32.

        S = softcap(scale Q K^T) + bias for queries (B, t, K, G, H) and keys (B, s, K, H).
        """
        # Accumulated in float32 for bfloat16 inputs too, as in the reference kernel.
        products = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32)
        scores = self.spec.capped(products)
        if self.bias is not None:
            block = self.bias(bias_arrays, self.indices(i), self.indices(j))
            scores = scores + by_group(block, scores.shape[1:3])
        return scores

    def allowed(self, mask: Mask, scores: Array, i: Array, j: Array) -> Array:
        """Return where queries of block i attend to real keys of block j, (B or 1, K or 1, G or 1, t, s)."""
        keys = self.indices(j)
        block = by_group(mask.block(self.indices(i), keys), scores.shape[1:3])
        return block & (keys < self.num_keys)[None, None, None, None, :]

    def dropped(self, weights: Array, key: PRNGKey | None, i: Array, j: Array) -> Array:
        """Apply dropout to weights (B, K, G, t, s), in the backward pass the same: the key depends on i and j alone."""
        if self.spec.dropout_rate == 0.0:
            return weights
        return self.spec.drop(weights, jax.random.fold_in(jax.random.fold_in(key, i), j))

    def split(self, array: Array, blocks: int) -> Array:
        """Split the length into blocks, (B, L, ...) -> (blocks, B, block, ...), padded with zeros."""
        batch, length = array.shape[:2]
        padding = [(0, 0), (0, blocks * self.block - length)] + [(0, 0)] * (array.ndim - 2)
        return jnp.pad(array, padding).reshape(batch, blocks, self.block, *array.shape[2:]).swapaxes(0, 1)

    def join(self, array: Array, length: int) -> Array:
        """Undo `split`, (blocks, B, block, ...) -> (B, length, ...), without the padding."""
        array = array.swapaxes(0, 1)
        return array.reshape(array.shape[0], -1, *array.shape[3:])[:, :length]

    def each_key_block(self, mask: Mask, i: Array, body: Callable, carry: PyTree) -> PyTree:
        """Fold body(j, carry) over the key blocks j that contain a visible key for some query of block i."""

        def step(j, carry):
            # The last block may be padded. Clipping repeats its last index, which does not change the answer.
            queries = jnp.minimum(self.indices(i), self.num_queries - 1)
            keys = jnp.minimum(self.indices(j), self.num_keys - 1)
            # cond runs only the branch that it selects, so a skipped block costs no matrix multiplication.
            return jax.lax.cond(
                mask.block_visible(queries, keys), functools.partial(body, j), lambda unchanged: unchanged, carry
            )

        return jax.lax.fori_loop(0, self.key_blocks, step, carry)


def first_softmax(shape: tuple[int, int, int, int], value_dim: int, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Return a running softmax before its first key, for queries (B, K, G, t) and sinks (K, G)."""
    if sinks is None:
        top, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
    else:  # a sink is a key before all others, without a value: m = sink, l = exp(sink - m) = 1
        top, total = jnp.broadcast_to(sinks[None, :, :, None], shape), jnp.ones(shape)
    return top, total, jnp.zeros((*shape, value_dim))


def next_softmax(
    state: tuple[Array, Array, Array], scores: Array, allowed: Array, value: Array, drop: Callable[[Array], Array]
) -> tuple[Array, Array, Array]:
    """Add the scores (B, K, G, t, s) of a block of keys and its values (B, s, K, Hv) to a running softmax.

    In the state, `top` is m and `total` is l, both (B, K, G, t); `out` is the sum exp(S - m) V, (B, K, G, t, Hv), which
    is divided by l only once, after the last block (Dao et al. 2022, arXiv 2205.14135, algorithm 1).
    """
    top, total, out = state
    scores = jnp.where(allowed, scores, -jnp.inf)
    # m_new = max(m, max_s S_s)
    new_top = jnp.maximum(top, scores.max(-1))
    # For a query that has seen no key yet, m is -inf and -inf - (-inf) would be NaN.
    finite = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
    weights = jnp.exp(scores - finite[..., None])
    # The earlier sums were relative to the old maximum: exp(m - m_new) converts them to the new one.
    shrink = jnp.exp(top - finite)
    # Dropout acts on the normalized weights, so l sums the weights before dropout.
    dropped = drop(weights).astype(value.dtype)
    # (B, K, G, t, s), (B, s, K, Hv) -> (B, K, G, t, Hv)
    part = jnp.einsum("bkgts,bskh->bkgth", dropped, value, preferred_element_type=jnp.float32)
    # l_new = exp(m - m_new) l + sum_s exp(S_s - m_new), and the same for the output.
    return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + part


def by_group(array: Array, groups: tuple[int, int]) -> Array:
    """Split the head axis: (B or 1, N or 1, t, s) -> (B or 1, K or 1, G or 1, t, s) with `groups` K and G."""
    if array.shape[1] == 1:
        return array[:, :, None]
    return array.reshape(array.shape[0], *groups, *array.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(plan, query, key, value, bias_arrays, sinks, mask, dropout_key):
    return forward(plan, query, key, value, bias_arrays, sinks, mask, dropout_key)[0]


def forward(
    plan: Blocks,
    query: Array,
    key: Array,
    value: Array,
    bias_arrays: list[Array],
    sinks: Array | None,
    mask: Mask,
    dropout_key: PRNGKey | None,
) -> tuple[Array, tuple]:
    """Compute the forward pass (Dao et al. 2022, arXiv 2205.14135, algorithm 1).

    Queries are (B, T, K, G, H), keys (B, S, K, H), values (B, S, K, Hv) and sinks (K, G). Returns the output (B, T, K,
    G, Hv) in float32, and the state for `backward`, of which the last element is the logsumexp L of the scores, (query
    blocks, B, K, G, t).
    """
    batch, _, kv_heads, groups, _ = query.shape
    keys, values = plan.split(key, plan.key_blocks), plan.split(value, plan.key_blocks)
    shape = (batch, kv_heads, groups, plan.block)

    def query_block(_, block):
        i, query = block

        def body(j, carry):
            scores = plan.scores(query, keys[j], bias_arrays, i, j)  # (B, K, G, t, s)
            allowed = plan.allowed(mask, scores, i, j)
            return next_softmax(carry, scores, allowed, values[j], lambda w: plan.dropped(w, dropout_key, i, j))

        start = first_softmax(shape, value.shape[-1], sinks)
        top, total, out = plan.each_key_block(mask, i, body, start)
        empty = total == 0.0  # no visible key: the output is 0, not 0 / 0
        out = out / jnp.where(empty, 1.0, total)[..., None]
        # L = m + log l. For a query without visible keys any finite value will do: the backward pass masks its weights.
        norm = jnp.where(empty, 0.0, top + jnp.log(jnp.where(empty, 1.0, total)))
        return None, (out.transpose(0, 3, 1, 2, 4), norm)  # (B, K, G, t, Hv) -> (B, t, K, G, Hv)

    blocks = (jnp.arange(plan.query_blocks), plan.split(query, plan.query_blocks))
    _, (out, norm) = jax.lax.scan(query_block, None, blocks)
    out = plan.join(out, plan.num_queries)
    return out, (query, key, value, bias_arrays, sinks, mask, dropout_key, out, norm)


def backward(plan: Blocks, saved: tuple, out_grad: Array) -> tuple:
    """Compute the backward pass (Dao et al. 2022, arXiv 2205.14135, algorithm 4) from dO (B, T, K, G, Hv).

    Returns the gradients of the arguments of `forward` after the plan; None for mask and dropout key.
    """
    query, key, value, bias_arrays, sinks, mask, dropout_key, out, norm = saved
    keys, values = plan.split(key, plan.key_blocks), plan.split(value, plan.key_blocks)
    out_grad = out_grad.astype(jnp.float32)
    # The derivative of the softmax is dS = P * (dP - D) with D = sum_s P_s dP_s, one number per query. D equals the dot
    # product of dO and O (FlashAttention, eq. 4), which needs no attention matrix. (B, T, K, G)
    delta = (out_grad * out).sum(-1)
    # Integer arrays of a bias (such as indices) have no gradient, so only the floating-point ones are differentiated.
    floats = [a for a in bias_arrays if jnp.issubdtype(a.dtype, jnp.floating)]

    def with_floats(floats):
        floats = iter(floats)
        return [next(floats) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in bias_arrays]

    def query_block(carry, block):
        i, query, out_grad, delta, norm = block
        # Queries that pad the last block add nothing below: their dO and D are zero.
        rows_grad = out_grad.transpose(0, 2, 3, 1, 4)  # (B, K, G, t, Hv)
        delta = delta.transpose(0, 2, 3, 1)  # (B, K, G, t)

        def body(j, carry):
            query_grad, keys_grad, values_grad, bias_grad = carry
            # `pull` maps dS to gradients of query, key and bias, through scale and softcap.
            scores, pull = jax.vjp(lambda q, k, f: plan.scores(q, k, with_floats(f), i, j), query, keys[j], floats)
            allowed = plan.allowed(mask, scores, i, j)
            # P = exp(S - L): the normalized weights, without another pass for the maximum and the sum.
            weights = jnp.where(allowed, jnp.exp(scores - norm[..., None]), 0.0)
            dropped = plan.dropped(weights, dropout_key, i, j)
            # dV = P^T dO, (B, s, K, Hv); dP = dO V^T, (B, K, G, t, s), with the dropout pattern of the forward pass.
            value_grad = jnp.einsum("bkgts,bkgth->bskh", dropped, rows_grad)
            weights_grad = jnp.einsum("bkgth,bskh->bkgts", rows_grad, values[j].astype(jnp.float32))
            weights_grad = plan.dropped(weights_grad, dropout_key, i, j)
            # dS = P * (dP - D)
            q, k, f = pull(weights * (weights_grad - delta[..., None]))
            # Sums over blocks are float32, whatever the dtype of the inputs: bfloat16 would lose small terms.
            return (
                query_grad + q.astype(jnp.float32),
                keys_grad.at[j].add(k.astype(jnp.float32)),
                values_grad.at[j].add(value_grad),
                jax.tree.map(lambda a, b: a + b.astype(jnp.float32), bias_grad, f),
            )

        carry = (jnp.zeros(query.shape, jnp.float32), *carry)
        query_grad, *carry = plan.each_key_block(mask, i, body, carry)
        return tuple(carry), query_grad

    start = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (keys, values, floats))
    split = functools.partial(plan.split, blocks=plan.query_blocks)
    blocks = (jnp.arange(plan.query_blocks), split(query), split(out_grad), split(delta), norm)
    (keys_grad, values_grad, bias_grad), query_grad = jax.lax.scan(query_block, start, blocks)

    sinks_grad = None
    if sinks is not None:
        logsumexp = plan.join(norm.transpose(0, 1, 4, 2, 3), plan.num_queries)  # (B, T, K, G)
        # A sink's weight is exp(sink - L). It has no value, so dP = 0 and dS = P * (0 - D), summed over rows and
        # queries.
        sinks_grad = -(jnp.exp(sinks[None, None] - logsumexp) * delta).sum((0, 1))
    bias_grad = with_floats([g.astype(a.dtype) for g, a in zip(bias_grad, floats, strict=True)])
    bias_grad = [g if jnp.issubdtype(g.dtype, jnp.floating) else None for g in bias_grad]
    return (
        plan.join(query_grad, plan.num_queries).astype(query.dtype),
        plan.join(keys_grad, plan.num_keys).astype(key.dtype),
        plan.join(values_grad, plan.num_keys).astype(value.dtype),
        bias_grad,
        sinks_grad,
        None,
        None,
    )


_blockwise.defvjp(forward, backward)
