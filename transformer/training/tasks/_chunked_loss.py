"""Token loss computed in chunks of tokens, with a custom VJP, so that the full logits are never in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from transformer.nn._axes import Array, DType, Hidden
from transformer.nn._parameter_axes import axes_of
from transformer.nn._partitioning import (
    constrain,
    device_kind,
    fsdp_axes,
    mesh_axes,
    num_parts,
    num_shards,
    platform,
    sum_of_parts,
)
from transformer.training._gpus import GPU_DEVICE_KINDS, GPUS

LOGITS_AT_ONCE = {"cpu": 2**21, "gpu": 2**27, "tpu": 2**27}
"""Default number of logits in memory per device, by platform. On CPU, they fit into the cache. On GPU and TPU, a chunk
has about a thousand tokens or more with common vocabulary sizes, so that its matrix multiplications use the hardware
fully (docs/benchmarks.md)."""

LARGE_GPU_LOGITS = 2**30
"""Default number of logits in memory on a GPU with at least `LARGE_MEMORY` bytes: 2 GiB in bfloat16, and as much for
their gradient. GPT-2 124M with 16 x 1,024 tokens then needs one chunk instead of 7, each of which adds to a gradient
(V, D) in float32."""

LARGE_MEMORY = 80 * 10**9
"""memory of a GPU from which it computes `LARGE_GPU_LOGITS` at once, bytes"""

WIDTHS_AT_ONCE = {"cpu": 0.25, "gpu": 0.25, "tpu": 1.0}
"""Smallest default chunk in tokens, as a multiple of the width D, by platform. Each chunk reads the kernel of the head
and adds to its gradient, both (D, V). With D / 4 tokens, the logits of a chunk (n, V) are small compared with these two
arrays: smaller chunks would save little memory and cost much time. On TPU, D tokens: a quarter of the chunks reads and
writes the gradient a quarter as often. The logits are then half as large as the gradient in float32, which is in memory
twice after the loop, before and after its sum over devices. For Llama 3 8B with fsdp 64 on v5p, compiled with libtpu
0.0.51, the traffic of the loss falls from 128 to 53 GB per chip, and its temporaries grow from 4.04 to 4.18 GiB."""

TokenSum: TypeAlias = Callable[..., PyTree]
"""(parameters of the head, hidden (1, n, D), targets (1, n), weights (1, n)) -> pytree of sums over n tokens"""


def tokens_at_once(hidden: Hidden, vocab_size: int) -> int | None:
    """Return the default number of tokens per chunk and device, for hidden states (B, T, D) of all devices.

    It gives `LOGITS_AT_ONCE` logits, and is at least `WIDTHS_AT_ONCE` x D. None if a device has no more than that.
    """
    rows, length, size = hidden.shape  # B, T, D
    most = most_at_once(platform(), vocab_size, size, num_shards("vocab"))
    return None if rows * length // (num_shards("batch") * num_shards("length")) <= most else most


def most_at_once(kind: str, vocab_size: int, size: int, vocab_ways: int = 1) -> int:
    """Return the most tokens in a chunk of one device, for width D and a vocabulary over `vocab_ways` devices."""
    # A device holds V / vocab_ways logits per token.
    gpu = GPUS.get(GPU_DEVICE_KINDS.get(device_kind(), "")) if kind == "gpu" else None
    is_large = gpu is not None and gpu.memory_bytes >= LARGE_MEMORY
    logits = max(LOGITS_AT_ONCE[kind], LARGE_GPU_LOGITS if is_large else 0)
    return max(logits * vocab_ways // vocab_size, int(WIDTHS_AT_ONCE[kind] * size), 1)


def sum_in_chunks(
    function: TokenSum, params: PyTree, hidden: Hidden, targets: PyTree, weights: Array, tokens: int
) -> PyTree:
    """Return the sums of `function` over all tokens, computed in chunks. Not for differentiation: see `loss_in_chunks`.

    `params` are those of the head, targets a tree of arrays (B, T, ...), and `tokens` the approximate number of tokens
    per chunk and device.
    """
    gathered = _gather_once(params, hidden.dtype)
    parts = _on_each_part(lambda *chunk: function(gathered, *chunk))
    chunks = _split(hidden, targets, weights, tokens)

    # The sums have two leading axes (Bp, Tp), one entry per part of rows and length, and each device holds its own
    # entry. So the loop does not communicate sums between devices; only the last line adds up the parts.
    def one(sums, chunk):
        return jax.tree.map(lambda a, b: _spread(a + b), sums, parts(*chunk)), None

    shapes = jax.eval_shape(parts, *jax.tree.map(lambda array: array[0], chunks))
    sums, _ = jax.lax.scan(one, jax.tree.map(lambda leaf: _spread(jnp.zeros_like(leaf)), shapes), chunks)
    return jax.tree.map(sum_of_parts, sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6))
def loss_in_chunks(
    function: TokenSum,
    params: PyTree,
    hidden: Hidden,
    targets: PyTree,
    weights: Array,
    tokens: int,
    gradient_dtype: str = "float32",
) -> Array:
    """Return the sum of a scalar `function` over all tokens, in chunks; differentiable by `params` and `hidden`.

    The forward pass also computes the gradients of each chunk, while the logits of this chunk are in memory. This is
    possible because the loss is a sum: the backward pass only scales the gradients by the incoming cotangent. Logits
    are neither stored nor recomputed, and the peak memory is that of the gradients and the logits of one chunk (as in
    Liger Kernel, Hsu et al. 2024, arXiv 2410.10989, section 3.2). Each device accumulates the gradients of the
    parameters in float32; they are summed over devices once, at the end: those of matrices with an axis V in
    `gradient_dtype`, the small others in float32. The other arguments are those of `sum_in_chunks`.
    """
    # Without differentiation, this body runs. With it, JAX calls `_forward` and `_backward` instead.
    return sum_in_chunks(function, params, hidden, targets, weights, tokens)


def _forward(function, params, hidden, targets, weights, tokens, gradient_dtype):
    # Forward rule of the custom VJP: the loss, and its gradients as residuals.
    gradients = jax.value_and_grad(function, argnums=(0, 1))  # with respect to params and hidden
    gathered = _gather_once(params, hidden.dtype)
    parts = _on_each_part(lambda *chunk: gradients(gathered, *chunk))
    chunks = _split(hidden, targets, weights, tokens)

    def spread(value, by_params):
        return _spread(value), jax.tree_util.tree_map_with_path(
            lambda p, a: _spread(a, *_head_axes(p, a.ndim - 2)), by_params
        )

    def one(sums, chunk):
        # value (Bp, Tp), by_params (Bp, Tp, *params), by_hidden (Bp, Tp, 1, n, D). The sums over chunks are carried
        # (a.dtype is float32, also for bfloat16 parameters); the gradients of hidden states are stacked over chunks.
        value, (by_params, by_hidden) = parts(*chunk)
        return spread(*jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, (value, by_params))), by_hidden

    value, (by_params, _) = jax.eval_shape(parts, *jax.tree.map(lambda array: array[0], chunks))
    # Accumulate in float32: in bfloat16, adding the small gradient of one chunk to a large sum would round it away.
    zero = spread(*jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (value, by_params)))
    sums, by_hidden = jax.lax.scan(one, zero, chunks)

    def over_devices(path, parts):
        is_matrix = parts.ndim > 3 and "vocab" in _head_axes(path, parts.ndim - 2)
        return sum_of_parts(parts, gradient_dtype if is_matrix else None)

    total, by_params = sum_of_parts(sums[0]), jax.tree_util.tree_map_with_path(over_devices, sums[1])
    by_params = jax.tree.map(lambda a, leaf: a.astype(leaf.dtype), by_params, params)
    return total, _summed_first(by_params, _join(by_hidden, hidden))


def _backward(function, tokens, gradient_dtype, saved, factor):
    # Chain rule: d f(L) / dx = f'(L) dL/dx, where `factor` is the cotangent f'(L) of the loss L. Targets and weights
    # get no gradient.
    by_params, by_hidden = jax.tree.map(lambda a: (factor * a).astype(a.dtype), saved)
    return by_params, by_hidden, None, None


loss_in_chunks.defvjp(_forward, _backward)


def _summed_first(by_params: PyTree, by_hidden: Hidden) -> tuple[PyTree, Hidden]:
    """Let a TPU sum the gradients of the head over devices before the backward pass of the layers begins.

    The TPU compiler would sum them at the end of the step: until then each device would hold all of its own gradient in
    float32. For Llama 3 8B with fsdp 64 on v5p, compiled with libtpu 0.0.51, the peak falls from 11.23 to 10.22 GiB.
    """
    if platform() != "tpu":
        return by_params, by_hidden

    def as_stored(path, gradient):
        axes = axes_of(jax.tree_util.keystr(path, simple=True, separator="/"), gradient.ndim)
        if gradient.ndim != 2 or axes is None or set(axes.names) != {"embed", "vocab"}:
            return gradient
        sizes = dict(zip(axes.names, gradient.shape, strict=True))
        split = {"embed": fsdp_axes(sizes["embed"]), "vocab": mesh_axes("vocab")}
        if not split["embed"] or sizes["vocab"] % num_shards("vocab"):
            return gradient
        return jax.lax.with_sharding_constraint(gradient, PartitionSpec(*(split[name] or None for name in axes.names)))

    return jax.lax.optimization_barrier((jax.tree_util.tree_map_with_path(as_stored, by_params), by_hidden))


def _gather_once(params: PyTree, dtype: DType) -> PyTree:
    """Gather the axis D of the head's kernels, in the dtype of its matrix multiplications, before the loop over chunks.

    Otherwise the loop would gather them from all devices again for each chunk. The head itself converts its kernels to
    this dtype, so the logits do not change. An axis V that is sharded for tensor parallelism stays sharded.
    """

    def gather(path, leaf):
        if leaf.ndim < 2:
            return leaf  # biases and the scales of norms are small, and used in float32
        return constrain(leaf.astype(dtype), *_head_axes(path, leaf.ndim))

    return jax.tree_util.tree_map_with_path(gather, params)


def _head_axes(path: tuple, ndim: int) -> tuple[str | None, ...]:
    """Return the logical axis names of a parameter of the head: V may be sharded for tensor parallelism, D is not."""
    axes = axes_of(jax.tree_util.keystr(path, simple=True, separator="/"), ndim)
    return (None,) * ndim if axes is None else tuple("vocab" if name == "vocab" else None for name in axes.names)


def _on_each_part(function: Callable) -> Callable:
    """Return `function` mapped over two leading axes: (Bp, Tp, n, ...) arrays, passed as (1, n, ...)."""
    return jax.vmap(jax.vmap(lambda *parts: function(*jax.tree.map(lambda part: part[None], parts))))


def _spread(sums: Array, *names: str | None) -> Array:
    """Shard the axes (Bp, Tp) like B and T of a batch, so that each device keeps its own sums; `names`: other axes."""
    return constrain(sums, "batch", "length", *names, *[None] * (sums.ndim - 2 - len(names)))


def _chunks(rows: int, length: int, tokens: int) -> tuple[int, int]:
    """Return the number of chunks, and of positions per chunk, for the `rows` x `length` tokens of a device.

    A chunk contains all rows. The positions are distributed evenly, so that padding adds less than one per chunk.
    """
    positions = min(max(tokens // rows, 1), length)
    chunks = math.ceil(length / positions)
    return chunks, math.ceil(length / chunks)


def _split(hidden: Hidden, targets: PyTree, weights: Array, tokens: int) -> tuple[Array, PyTree, Array]:
    """Reshape (B, T, ...) to (chunks, Bp, Tp, n, ...), where Bp and Tp are the numbers of parts of the axes B and T.

    Tokens stay on their device. If the chunks do not divide the length of a part, it is padded with weight 0.
    """
    batch, length = num_parts(*hidden.shape[:2])

    def split(array):
        rows, positions = array.shape[0] // batch, array.shape[1] // length
        chunks, each = _chunks(rows, positions, tokens)
        array = array.reshape(batch, rows, length, positions, *array.shape[2:])  # (Bp, B/Bp, Tp, T/Tp, ...)
        if chunks * each > positions:
            widths = [(0, 0)] * array.ndim
            widths[3] = (0, chunks * each - positions)
            array = jnp.pad(array, widths)
        array = array.reshape(batch, rows, length, chunks, each, *array.shape[4:])
        array = array.transpose(3, 0, 2, 1, 4, *range(5, array.ndim))  # (chunks, Bp, Tp, B/Bp, each, ...)
        array = array.reshape(chunks, batch, length, rows * each, *array.shape[5:])  # (chunks, Bp, Tp, n, ...)
        return constrain(array, None, "batch", "length", *[None] * (array.ndim - 3))

    return split(hidden), jax.tree.map(split, targets), split(weights)


def _join(array: Array, like: Hidden) -> Hidden:
    """Invert `_split`: reshape (chunks, Bp, Tp, n, D) or (chunks, Bp, Tp, 1, n, D) to (B, T, D), without padding."""
    batch, length = num_parts(*like.shape[:2])
    rows, positions = like.shape[0] // batch, like.shape[1] // length
    chunks, each = array.shape[0], array.size // (array.shape[0] * batch * length * rows * like.shape[2])
    array = array.reshape(chunks, batch, length, rows, each, like.shape[2]).transpose(1, 3, 2, 0, 4, 5)
    # (Bp, B/Bp, Tp, chunks, each, D): join chunks to positions, and drop the padding
    array = array.reshape(batch, rows, length, chunks * each, like.shape[2])[:, :, :, :positions]
    return constrain(array.reshape(like.shape), "batch", "length", "embed")
