"""Flax's attention module and attention function, with their signatures, computed by the kernels of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.nn._attention import attend
from transformer.nn._axes import Array, DType, Float, PRNGKey
from transformer.nn._masks import Mask
from transformer.nn.kernels._arguments import score_scale
from transformer.nn.kernels._contract import AttentionSpec

__all__ = ["MultiHeadDotProductAttention", "dot_product_attention"]


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S N H"],
    value: Float[Array, "*B S N Hv"],
    bias: Array | None = None,
    mask: Mask | Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: PRNGKey | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DType | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    *,
    implementation: str = "auto",
) -> Float[Array, "*B T N Hv"]:
    """Compute `flax.linen.dot_product_attention` with the kernels of this package.

    The result equals Flax's up to rounding: the output of a query without visible keys is the mean of all values, and
    with the kernel "reference" the same key drops the same weights. The softmax is always computed in float32.

    Args:
        query: (*B, T, N, H), with any number of batch axes.
        key: (*B, S, N, H), with as many heads as the query.
        value: (*B, S, N, Hv).
        bias: added to the scores; broadcasts to (*B, N, T, S).
        mask: an array that broadcasts to (*B, N, T, S), where nonzero means that the query attends; or a `Mask`, whose
            hidden blocks kernels can skip. With a `Mask`, the output of a query without visible keys is 0.
        broadcast_dropout: use the same dropout mask (T, S) for all rows of the batch and all heads.
        dropout_rng: random key of the dropout.
        dropout_rate: fraction of the weights set to zero.
        deterministic: True disables dropout.
        dtype: dtype of the computation; None: that of the inputs.
        precision: precision of the two matrix multiplications, as `jax.lax.Precision`.
        module: a module that sows the weights as `attention_weights` in its collection "intermediates".
        force_fp32_for_softmax: no effect; see above.
        einsum_dot_general: replaces the matrix multiplications, as do the next two. If one of them is given, Flax's own
            function is called, because these functions only fit its formula.
        qk_attn_weights_einsum: replaces the multiplication of queries and keys.
        attn_weights_value_einsum: replaces the multiplication of weights and values.
        implementation: name of a kernel in `transformer.nn.kernels`, or "auto".

    Returns:
        The attended values (*B, T, N, Hv).

    Raises:
        AssertionError: shapes that don't match, as in Flax.
        ValueError: a mask or bias that doesn't broadcast, or dropout without a key.
    """
    replaced = (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    if any(given is not None for given in replaced):
        # Flax's own formula, with the full scores (*B, N, T, S) and a dense mask
        dropout = (broadcast_dropout, dropout_rng, dropout_rate, deterministic)
        options = (*dropout, dtype, precision, module, force_fp32_for_softmax, *replaced)
        mask = mask.dense(query.shape[-3], key.shape[-3]) if isinstance(mask, Mask) else mask
        return nn.dot_product_attention(query, key, value, bias, mask, *options)
    query, key, value = nn.dtypes.promote_dtype(query, key, value, dtype=dtype)
    _check_shapes(query, key, value)
    if mask is not None and not isinstance(mask, Mask):
        query, bias, mask = _as_flax_masks(query, bias, jnp.asarray(mask).astype(bool))
    dropout_rate = 0.0 if deterministic else dropout_rate
    spec = AttentionSpec(
        mask=mask,
        bias=bias,
        dropout_key=dropout_rng,
        scale=score_scale(None, query.shape[-1]),
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout and dropout_rate > 0.0,
        return_weights=module is not None,
    )
    with _matmul_precision(precision):
        out, weights = attend(query, key, value, spec, implementation)
    if module is not None:
        module.sow("intermediates", "attention_weights", weights.astype(query.dtype))
    return out


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` with the kernels of this package (Vaswani et al. 2017, section 3.2.2).

    Fields, defaults, parameters, initial values, cache and errors are the same as in Flax, and outputs are equal up to
    rounding. Only the default of `attention_fn` differs. To choose a kernel, set it to
    `functools.partial(transformer.nn.compat.dot_product_attention, implementation="blockwise")`. `mask` may also be a
    `transformer.Mask`, which avoids an array of T x S for a causal mask.
    """

    attention_fn: Callable[..., Array] = dot_product_attention

    def __call__(
        self,
        inputs_q: Float[Array, "*B T D"],
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        inputs_kv: Array | None = None,
        mask: Mask | Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: PRNGKey | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*B T Do"]:
        """Apply attention: (*B, T, D) -> (*B, T, out_features). The arguments are those of Flax's module.

        Raises:
            ValueError: a `Mask` with `decode`, because Flax masks the cache with an array.
        """
        if self.decode and isinstance(mask, Mask):
            raise ValueError(
                "with decode=True mask must be an array that broadcasts to (..., N, 1, length of the cache), got a "
                "Mask. Leave a causal mask out: only filled slots of the cache are attended to."
            )
        options = {"inputs_kv": inputs_kv, "mask": mask, "deterministic": deterministic}
        options |= {"dropout_rng": dropout_rng, "sow_weights": sow_weights}
        return super().__call__(inputs_q, inputs_k, inputs_v, **options)


def _as_flax_masks(query: Array, bias: Array | None, mask: Array) -> tuple[Array, Array | None, Array]:
    """Return query, bias and mask with which the output of a query without visible keys is the mean of all values."""
    # In Flax all hidden keys have the same large negative score, so their weights are uniform, if there are no others.
    # The same weights follow if such a query attends to every key with scores of 0: zero query, zero bias, no mask.
    # The scores (*B, N, T, S) have as many axes as the query (*B, T, N, H). softmax(0, ..., 0) = 1 / S for each key.
    mask = mask.reshape((1,) * (query.ndim - mask.ndim) + mask.shape)
    seen = mask.any(-1, keepdims=True)  # (B, N or 1, T or 1, 1): whether the query sees any key
    # (*B, N, T, 1) -> (*B, T, N, 1), the order of the query
    query = jnp.where(seen.swapaxes(-3, -2), query, 0)
    if bias is not None:
        bias = jnp.asarray(bias)
        bias = jnp.where(seen, bias.reshape((1,) * (query.ndim - bias.ndim) + bias.shape), 0)
    return query, bias, mask | ~seen  # a query without visible keys sees all of them


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    if not query.ndim == key.ndim == value.ndim:
        problem = "they must have the same number of axes"
    elif not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        problem = "their batch axes must be the same"
    elif not query.shape[-2] == key.shape[-2] == value.shape[-2]:
        problem = "they must have the same number of heads"
    elif key.shape[-3] != value.shape[-3]:
        problem = "key and value must have the same length"
    elif query.shape[-1] != key.shape[-1]:
        problem = "query and key must have the same head size"
    else:
        return
    # An AssertionError, because Flax asserts: code that catches its errors also catches this one.
    raise AssertionError(f"query {query.shape}, key {key.shape}, value {value.shape}: {problem}.")


def _matmul_precision(precision: jax.lax.PrecisionLike) -> contextlib.AbstractContextManager:
    if precision is None:
        return contextlib.nullcontext()
    # Flax allows one precision for each of the two factors.
    if isinstance(precision, tuple) and len(set(precision)) == 1:
        precision = precision[0]
    # Kernels take no precision: a context sets it for all matrix multiplications that are traced inside.
    name = precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
    return jax.default_matmul_precision(name)
