"""The loss of every token without all logits at once: a part of the tokens at a time, with a derivative of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Hidden
from transformer.nn._partitioning import constrain, num_shards, platform

LOGITS_AT_ONCE = {"cpu": 2**21, "gpu": 2**27, "tpu": 2**27}
"""logits that a device holds at once where nothing else is asked for: on CPU what stays in its cache; elsewhere at
least a thousand rows for any vocabulary in use, so that the products fill the matrix units (docs/benchmarks.md)"""

TokenSum: TypeAlias = Callable[..., Any]
"""(parameters of the head, hidden (1, n, D), targets (1, n), weights (1, n)) -> a tree of sums over the n tokens"""


def tokens_at_once(hidden: Hidden, vocab_size: int) -> int | None:
    """Tokens of a device whose logits are `LOGITS_AT_ONCE` together; None: all of hidden (B, T, D) are no more.

    At least D / 4: each chunk reads the head and adds to its gradient, which have D numbers an entry; beside those, a
    chunk of fewer logits than that saves little memory and much time goes by.
    """
    rows, length, size = hidden.shape
    most = most_at_once(platform(), vocab_size, size, num_shards("vocab"))
    return None if rows * length // (num_shards("batch") * num_shards("length")) <= most else most


def most_at_once(kind: str, vocab_size: int, size: int, vocab_ways: int = 1) -> int:
    """The most tokens that `tokens_at_once` allows, on devices of a kind ("cpu", "gpu", "tpu"), for hidden states of a
    size and a vocabulary over so many devices.
    """
    return max(LOGITS_AT_ONCE[kind] * vocab_ways // vocab_size, size // 4, 1)


def sum_in_chunks(function: TokenSum, params: Any, hidden: Hidden, targets: Array, weights: Array, tokens: int) -> Any:
    """What `function` gives of all tokens of hidden (B, T, D), targets and weights (B, T), computed of about `tokens`
    of each device at a time; no derivative.
    """
    parts = _on_each_part(lambda *chunk: function(params, *chunk))
    chunks = _split(hidden, targets, weights, tokens)

    def one(sums, chunk):
        return jax.tree.map(lambda a, b: _spread(a + b), sums, parts(*chunk)), None

    shapes = jax.eval_shape(parts, *(array[0] for array in chunks))
    sums, _ = jax.lax.scan(one, jax.tree.map(lambda leaf: _spread(jnp.zeros_like(leaf)), shapes), chunks)
    return jax.tree.map(lambda a: a.sum((0, 1)), sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def loss_in_chunks(
    function: TokenSum, params: Any, hidden: Hidden, targets: Array, weights: Array, tokens: int
) -> Array:
    """`sum_in_chunks` of a `function` that gives one number, with a derivative by `params` and `hidden`.

    The gradient of a sum is known but for a factor, so each chunk's is made at once, while its logits are there: none
    is kept, none made twice, and beside the gradients themselves there is room for one chunk (as in Liger Kernel, Hsu
    et al. 2024, arXiv 2410.10989, section 3.2). Gradients by parameters are summed in float32, on each device alone,
    and over devices once, at the end.
    """
    return sum_in_chunks(function, params, hidden, targets, weights, tokens)


def _forward(function, params, hidden, targets, weights, tokens):
    gradients = jax.value_and_grad(function, argnums=(0, 1))
    parts = _on_each_part(lambda *chunk: gradients(params, *chunk))
    chunks = _split(hidden, targets, weights, tokens)

    def one(sums, chunk):
        value, (by_params, by_hidden) = parts(*chunk)
        return jax.tree.map(lambda a, b: _spread(a + b.astype(a.dtype)), sums, (value, by_params)), by_hidden

    value, (by_params, _) = jax.eval_shape(parts, *(array[0] for array in chunks))
    zero = jax.tree.map(lambda leaf: _spread(jnp.zeros(leaf.shape, jnp.float32)), (value, by_params))
    sums, by_hidden = jax.lax.scan(one, zero, chunks)
    total, by_params = jax.tree.map(lambda a: a.sum((0, 1)), sums)
    by_params = jax.tree.map(lambda a, leaf: a.astype(leaf.dtype), by_params, params)
    return total, (by_params, _join(by_hidden, hidden))


def _backward(function, tokens, saved, factor):
    by_params, by_hidden = jax.tree.map(lambda a: (factor * a).astype(a.dtype), saved)
    return by_params, by_hidden, None, None


loss_in_chunks.defvjp(_forward, _backward)


def ways_of(hidden: Hidden) -> tuple[int, int]:
    """Into how many parts the mesh in force splits the rows and the length of hidden (B, T, D)."""
    return tuple(
        num_shards(name) if size % num_shards(name) == 0 else 1
        for name, size in zip(("batch", "length"), hidden.shape[:2], strict=True)
    )


def _on_each_part(function: Callable) -> Callable:
    """The function of (n, ...) arrays, over leading axes (parts of the rows, parts of the length)."""
    return jax.vmap(jax.vmap(lambda *parts: function(*(part[None] for part in parts))))


def _spread(sums: Array) -> Array:
    return constrain(sums, "batch", "length", *[None] * (sums.ndim - 2))


def _chunks(rows: int, length: int, tokens: int) -> tuple[int, int]:
    """How many chunks, and positions a chunk, of `rows` x `length` tokens of a device."""
    positions = min(max(tokens // rows, 1), length)
    chunks = math.ceil(length / positions)
    return chunks, math.ceil(length / chunks)


def _split(hidden: Hidden, targets: Array, weights: Array, tokens: int) -> tuple[Array, Array, Array]:
    """(B, T, ...) -> (chunks, parts of B, parts of T, tokens of a chunk, ...): what a device holds stays there. Filled
    up with weight 0.
    """
    batch, length = ways_of(hidden)

    def split(array):
        rows, positions = array.shape[0] // batch, array.shape[1] // length
        chunks, each = _chunks(rows, positions, tokens)
        array = array.reshape(batch, rows, length, positions, *array.shape[2:])
        if chunks * each > positions:
            widths = [(0, 0)] * array.ndim
            widths[3] = (0, chunks * each - positions)
            array = jnp.pad(array, widths)
        array = array.reshape(batch, rows, length, chunks, each, *array.shape[4:])
        array = array.transpose(3, 0, 2, 1, 4, *range(5, array.ndim))
        array = array.reshape(chunks, batch, length, rows * each, *array.shape[5:])
        return constrain(array, None, "batch", "length", *[None] * (array.ndim - 3))

    return split(hidden), split(targets), split(weights)


def _join(array: Array, like: Hidden) -> Hidden:
    """(chunks, parts of B, parts of T, n, D) or (..., 1, n, D) -> (B, T, D)."""
    batch, length = ways_of(like)
    rows, positions = like.shape[0] // batch, like.shape[1] // length
    chunks, each = array.shape[0], array.size // (array.shape[0] * batch * length * rows * like.shape[2])
    array = array.reshape(chunks, batch, length, rows, each, like.shape[2]).transpose(1, 3, 2, 0, 4, 5)
    array = array.reshape(batch, rows, length, chunks * each, like.shape[2])[:, :, :, :positions]
    return constrain(array.reshape(like.shape), "batch", "length", "embed")
