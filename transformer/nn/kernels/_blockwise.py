"""Attention in blocks of queries and keys with a running softmax: memory linear in length, blocks nobody sees skipped.

The algorithm is FlashAttention's (Dao et al. 2022, arXiv 2205.14135) in plain JAX, so it runs anywhere. The forward
pass keeps the output and one number a row, log sum exp(scores); the backward pass makes each block of weights again
from them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Attended, Key, PRNGKey, Query, Value
from transformer.nn._masks import Mask
from transformer.nn.kernels._contract import AttentionSpec, bias_block

BLOCK = 128
"""queries and keys a block: on CPU the score block then stays in cache, on TPU it fills the matrix unit"""


def blockwise_attention(
    query: Query,
    key: Key,
    value: Value,
    spec: AttentionSpec,
    block: int = BLOCK,
) -> tuple[Attended, None]:
    """Attention over blocks of `block` queries by `block` keys (Dao et al. 2022, arXiv 2205.14135, section 3); the
    contract is that of `dot_product_attention`, the result (B, T, N, Hv).

    Dropout draws another pattern than the reference from the same key: one key a block.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, kv_heads, value_dim = value.shape[1:]
    block = min(block, max(num_queries, num_keys))

    # A block of scores, as a pure function of everything it depends on: the arrays a bias closes over become arguments,
    # so that they get gradients and no traced value hides in the custom derivative below.
    bias_arrays: list[jax.Array] = []
    evaluate = None
    if spec.bias is not None:
        index = jax.ShapeDtypeStruct((block,), jnp.int32)
        closed = jax.make_jaxpr(functools.partial(bias_block, spec.bias))(index, index)
        bias_arrays, evaluate = [jnp.asarray(const) for const in closed.consts], _evaluate(closed.jaxpr)
    plan = Blocks(spec, num_queries, num_keys, block, evaluate)

    rows = query.reshape(batch, num_queries, kv_heads, num_heads // kv_heads, head_dim)
    sinks = None if spec.sinks is None else spec.sinks.astype(jnp.float32).reshape(kv_heads, -1)
    out = _blockwise(plan, rows, key, value, bias_arrays, sinks, spec.mask, spec.dropout_key)
    return out.reshape(batch, num_queries, num_heads, value_dim).astype(value.dtype), None


def _evaluate(jaxpr) -> Callable:
    return lambda consts, *arguments: jax.core.eval_jaxpr(jaxpr, consts, *arguments)[0]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The static facts of one call in blocks (Dao et al. 2022, arXiv 2205.14135, section 3), and what a block is.

    Of `num_queries` T and `num_keys` S, `block` make a block. Arrays of the spec are arguments of the passes, not of
    this class.
    """

    spec: AttentionSpec
    num_queries: int
    num_keys: int
    block: int
    bias: Callable | None = None
    """(its arrays, query indices, key indices) -> that block of it; None: none is added"""

    def __post_init__(self):
        # Traced arrays must not outlive the pass that they belong to.
        static = dataclasses.replace(self.spec, mask=Mask(), bias=None, sinks=None, dropout_key=None)
        object.__setattr__(self, "spec", static)

    @property
    def query_blocks(self) -> int:
        """Blocks of queries, the last one perhaps filled up."""
        return math.ceil(self.num_queries / self.block)

    @property
    def key_blocks(self) -> int:
        """Blocks of keys, the last one perhaps filled up."""
        return math.ceil(self.num_keys / self.block)

    def indices(self, i: Array) -> Array:
        """Indices (t,) of the positions in block number i ()."""
        return i * self.block + jnp.arange(self.block)

    def scores(self, query: Array, key: Array, bias_arrays: list[Array], i: Array, j: Array) -> Array:
        """Scores of queries (B, t, K, G, H) in block i () and keys (B, s, K, H) in block j () before the mask, float32
        (B, K, G, t, s); `bias_arrays` of any shape.
        """
        products = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32)
        scores = self.spec.capped(products)
        if self.bias is not None:
            scores = scores + self.by_group(self.bias(bias_arrays, self.indices(i), self.indices(j)), scores)
        return scores

    def by_group(self, array: Array, scores: Array) -> Array:
        """(B or 1, N or 1, t, s) -> (B or 1, K or 1, G or 1, t, s), K and G as scores (B, K, G, t, s) have them."""
        if array.shape[1] == 1:
            return array[:, :, None]
        return array.reshape(array.shape[0], *scores.shape[1:3], *array.shape[2:])

    def allowed(self, mask: Mask, scores: Array, i: Array, j: Array) -> Array:
        """What of scores (B, K, G, t, s) in blocks i () and j () may be attended, (B or 1, K or 1, G or 1, t, s); keys
        that only fill up the last block may not.
        """
        keys = self.indices(j)
        return (
            self.by_group(mask.block(self.indices(i), keys), scores) & (keys < self.num_keys)[None, None, None, None, :]
        )

    def dropped(self, weights: Array, key: PRNGKey | None, i: Array, j: Array) -> Array:
        """Weights (B, K, G, t, s) of blocks i () and j () with some set to zero and the rest scaled up, again
        (B, K, G, t, s); the same ones in both passes.
        """
        if self.spec.dropout_rate == 0.0:
            return weights
        return self.spec.drop(weights, jax.random.fold_in(jax.random.fold_in(key, i), j))

    def split(self, array: Array, blocks: int) -> Array:
        """(B, L, ...) -> (blocks, B, block, ...), filled up with zeros."""
        batch, length = array.shape[:2]
        padding = [(0, 0), (0, blocks * self.block - length)] + [(0, 0)] * (array.ndim - 2)
        return jnp.pad(array, padding).reshape(batch, blocks, self.block, *array.shape[2:]).swapaxes(0, 1)

    def join(self, array: Array, length: int) -> Array:
        """(blocks, B, block, ...) -> (B, length, ...)."""
        array = array.swapaxes(0, 1)
        return array.reshape(array.shape[0], -1, *array.shape[3:])[:, :length]

    def each_key_block(self, mask: Mask, i: Array, body: Callable, carry: Any) -> Any:
        """Folds body(j, carry) over the key blocks that some query of block i () may attend: from a tree to a tree of
        the same shapes.
        """

        def step(j, carry):
            # The last block is filled up: indices past the end say nothing more than the last one does.
            queries = jnp.minimum(self.indices(i), self.num_queries - 1)
            keys = jnp.minimum(self.indices(j), self.num_keys - 1)
            return jax.lax.cond(mask.block_visible(queries, keys), functools.partial(body, j), lambda same: same, carry)

        return jax.lax.fori_loop(0, self.key_blocks, step, carry)


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
    """Attended values of queries (B, T, K, G, H), keys (B, S, K, H), values (B, S, K, Hv), bias arrays of any shape and
    sinks (K, G): (B, T, K, G, Hv) float32, and the state that `backward` needs (Dao et al. 2022, arXiv 2205.14135,
    algorithm 1). Of that the last is log sum exp(scores), (query blocks, B, K, G, t).
    """
    batch, _, kv_heads, groups, _ = query.shape
    keys, values = plan.split(key, plan.key_blocks), plan.split(value, plan.key_blocks)
    shape = (batch, kv_heads, groups, plan.block)

    def one(_, block):
        i, query = block

        def body(j, carry):
            top, total, out = carry
            scores = plan.scores(query, keys[j], bias_arrays, i, j)
            allowed = plan.allowed(mask, scores, i, j)
            scores = jnp.where(allowed, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            finite = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
            weights = jnp.exp(scores - finite[..., None])
            shrink = jnp.exp(top - finite)
            dropped = plan.dropped(weights, dropout_key, i, j).astype(values.dtype)
            part = jnp.einsum("bkgts,bskh->bkgth", dropped, values[j], preferred_element_type=jnp.float32)
            return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + part

        if sinks is None:
            top, total = jnp.full(shape, -jnp.inf), jnp.zeros(shape)
        else:  # a sink is a key seen before all others, with no value
            top, total = jnp.broadcast_to(sinks[None, :, :, None], shape), jnp.ones(shape)
        start = (top, total, jnp.zeros((*shape, value.shape[-1])))
        top, total, out = plan.each_key_block(mask, i, body, start)
        empty = total == 0.0
        out = out / jnp.where(empty, 1.0, total)[..., None]
        # An empty row has no weights in the backward pass whatever its norm says: the mask hides all of it.
        norm = jnp.where(empty, 0.0, top + jnp.log(jnp.where(empty, 1.0, total)))
        return None, (out.transpose(0, 3, 1, 2, 4), norm)

    blocks = (jnp.arange(plan.query_blocks), plan.split(query, plan.query_blocks))
    _, (out, norm) = jax.lax.scan(one, None, blocks)
    out = plan.join(out, plan.num_queries)
    return out, (query, key, value, bias_arrays, sinks, mask, dropout_key, out, norm)


def backward(plan: Blocks, saved: tuple, out_grad: Array) -> tuple:
    """Gradients, a tree like the arguments of `forward` after the plan, of what it saved, its state, and the gradient
    (B, T, K, G, Hv) of its output (Dao et al. 2022, arXiv 2205.14135, algorithm 4).
    """
    query, key, value, bias_arrays, sinks, mask, dropout_key, out, norm = saved
    keys, values = plan.split(key, plan.key_blocks), plan.split(value, plan.key_blocks)
    out_grad = out_grad.astype(jnp.float32)
    # sum_s weights dweights, the same for all keys of a row: softmax's derivative subtracts it (FlashAttention, eq. 4).
    delta = (out_grad * out).sum(-1)
    floats = [a for a in bias_arrays if jnp.issubdtype(a.dtype, jnp.floating)]

    def with_floats(floats):
        floats = iter(floats)
        return [next(floats) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in bias_arrays]

    def one(carry, block):
        i, query, out_grad, delta, norm = block
        rows_grad = out_grad.transpose(0, 2, 3, 1, 4)  # (B, K, G, t, Hv)
        delta = delta.transpose(0, 2, 3, 1)

        def body(j, carry):
            query_grad, keys_grad, values_grad, bias_grad = carry
            scores, pull = jax.vjp(lambda q, k, f: plan.scores(q, k, with_floats(f), i, j), query, keys[j], floats)
            allowed = plan.allowed(mask, scores, i, j)
            weights = jnp.where(allowed, jnp.exp(scores - norm[..., None]), 0.0)
            dropped = plan.dropped(weights, dropout_key, i, j)
            value_grad = jnp.einsum("bkgts,bkgth->bskh", dropped, rows_grad)
            weights_grad = jnp.einsum("bkgth,bskh->bkgts", rows_grad, values[j].astype(jnp.float32))
            weights_grad = plan.dropped(weights_grad, dropout_key, i, j)
            q, k, f = pull(weights * (weights_grad - delta[..., None]))
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
    (keys_grad, values_grad, bias_grad), query_grad = jax.lax.scan(one, start, blocks)

    sinks_grad = None
    if sinks is not None:
        rows = plan.join(norm.transpose(0, 1, 4, 2, 3), plan.num_queries)  # (B, T, K, G)
        sinks_grad = -(jnp.exp(sinks[None, None] - rows) * delta).sum((0, 1))
    bias_grad = with_floats([g.astype(a.dtype) for g, a in zip(bias_grad, floats, strict=True)])
    bias_grad = [
        g if jnp.issubdtype(a.dtype, jnp.floating) else None for g, a in zip(bias_grad, bias_arrays, strict=True)
    ]
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
