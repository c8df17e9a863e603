"""Arguments of `dot_product_attention`: checked, and converted to the form in which kernels take them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import Array
from transformer.nn._masks import Mask
from transformer.nn.kernels._contract import AttentionShapes, AttentionSpec, BiasFunction, bias_block


def kernel_arguments(
    query: Array, key: Array, value: Array, spec: AttentionSpec
) -> tuple[Array, Array, Array, AttentionSpec]:
    """Return the arguments of a kernel: exactly one batch axis, a `Mask`, a bias function, and the sizes of the call.

    Arrays may have any number of batch axes, and the mask and bias of `spec` may be arrays. A ValueError for shapes
    that don't fit, a scale or dropout rate out of range, or a dropout rate without a key.
    """
    check_shapes(query, key, value, spec.sinks)
    if not 0.0 <= spec.dropout_rate < 1.0:
        raise ValueError(f"dropout_rate must be at least 0 and below 1, got {spec.dropout_rate}.")
    if spec.dropout_rate > 0.0 and spec.dropout_key is None:
        raise ValueError("dropout_rate is above 0 but dropout_key is None: pass a jax.random.key, or dropout_rate=0.")
    if not spec.scale > 0:
        raise ValueError(f"scale must be above 0, got {spec.scale}. Use scale=1.0 for unscaled attention.")
    lead, mask, bias = query.shape[:-3], spec.mask, spec.bias
    if len(lead) != 1:
        query, key, value = (array.reshape(math.prod(lead), *array.shape[-3:]) for array in (query, key, value))
        mask, bias = (with_one_batch_axis(array, lead) for array in (mask, bias))
    batch, num_queries, num_heads, _ = query.shape
    sizes = (batch, num_heads, num_queries, key.shape[1])
    spec = dataclasses.replace(
        spec,
        mask=checked_mask(mask, sizes).with_padding_as_segments(num_queries),
        bias=bias_function(bias, sizes),
        shapes=AttentionShapes.of(query, key, value),
    )
    return query, key, value, spec


def score_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor on the scores: `scale`, or 1 / sqrt(H) for None."""
    # q . k is a sum of H terms. For entries of mean 0 and variance 1 its variance is H, so dividing by sqrt(H)
    # restores variance 1 and keeps the softmax from saturating (Vaswani et al. 2017, section 3.2.1, footnote 4).
    return 1.0 / math.sqrt(head_dim) if scale is None else scale


def check_shapes(query: Array, key: Array, value: Array, sinks: Array | None) -> None:
    """Raise a ValueError that lists every mismatch of the shapes, not only the first one."""
    for name, array in {"query": query, "key": key, "value": value}.items():
        if array.ndim < 3 or array.ndim != max(query.ndim, key.ndim, value.ndim):
            raise ValueError(f"{name} must be (batch, length, heads, head size), got shape {array.shape}.")
    problems = []
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        problems.append("the batch sizes differ")
    if key.shape[-3:-1] != value.shape[-3:-1]:
        problems.append("key and value must have the same length and heads")
    if query.shape[-1] != key.shape[-1]:
        problems.append("query and key must have the same head size")
    # Head n uses key head n // G, G = N / K.
    if query.shape[-2] % key.shape[-2]:
        problems.append("query heads must be a multiple of key heads")
    if sinks is not None and sinks.shape != query.shape[-2:-1]:
        problems.append(f"sinks {sinks.shape} must have one number per query head")
    if problems:
        shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
        raise ValueError(f"attention can't be computed for {shapes}: {'; '.join(problems)}.")


def checked_mask(mask: Mask | Array | None, sizes: tuple[int, int, int, int]) -> Mask:
    """Convert the mask to a `Mask` and check it against `sizes` (B, N, T, S). A one-dimensional array masks keys."""
    if mask is not None and not isinstance(mask, Mask) and np.ndim(mask) <= 1:
        mask = mask[None]
    mask = Mask.of(mask)
    mask.check(*sizes)
    return mask


def with_one_batch_axis(array: Any, lead: tuple[int, ...]) -> Any:
    """Reshape what broadcasts to (*lead, N, T, S) to what broadcasts to (B, N, T, S); other arguments stay."""
    if array is None or isinstance(array, Mask) or not hasattr(array, "shape") or array.ndim <= 3:
        return array
    batch, rest = (1,) * (len(lead) + 3 - array.ndim) + array.shape[:-3], array.shape[-3:]
    # The same for all rows: keep a batch axis of size 1 rather than B copies.
    if math.prod(batch) == 1:
        return array.reshape(1, *rest)
    # Several batch axes of which some are 1: only the broadcast array can be merged to one axis B.
    return jnp.broadcast_to(array.reshape(*batch, *rest), (*lead, *rest)).reshape(math.prod(lead), *rest)


def bias_function(bias: BiasFunction | Array | None, shape: tuple[int, int, int, int]) -> BiasFunction | None:
    """Convert a bias to a function of (query indices (t,), key indices (s,)); `shape` is (B, N, T, S)."""
    # A `Partial` is a pytree with the array as its leaf, which thus gets a gradient through jit, scan and the kernels.
    if bias is None or isinstance(bias, jax.tree_util.Partial):
        return bias
    if callable(bias) and not hasattr(bias, "shape"):
        return jax.tree_util.Partial(bias)  # arrays in the function's closure are not leaves of this pytree
    bias = jnp.asarray(bias)
    if bias.ndim > 4 or any(size not in (1, whole) for size, whole in zip(bias.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"the bias of shape {bias.shape} doesn't broadcast to (B, N, T, S) = {shape}.")
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    bias = jnp.broadcast_to(bias, (*bias.shape[:2], *shape[2:]))  # (B or 1, N or 1, T, S): T and S are indexed below
    return jax.tree_util.Partial(_bias_of, bias)


def _bias_of(bias: Array, queries: Array, keys: Array) -> Array:
    return bias[:, :, queries][:, :, :, keys]  # (B or 1, N or 1, t, s)


def sum_of_biases(bias: BiasFunction | None, more: BiasFunction | None) -> BiasFunction | None:
    # A sum of functions rather than of arrays: a blockwise kernel adds the two blocks and never stores the full sum.
    if bias is None or more is None:
        return more if bias is None else bias
    return jax.tree_util.Partial(_sum_of_blocks, bias, more)


def _sum_of_blocks(bias: BiasFunction, more: BiasFunction, queries: Array, keys: Array) -> Array:
    return bias_block(bias, queries, keys) + bias_block(more, queries, keys)
