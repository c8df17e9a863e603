"""Attention as a pure function: `dot_product_attention`, and `attend`, which takes its options as one value."""

from __future__ import annotations

import dataclasses
import math

from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from transformer.nn._axes import Array, Attended, Float, Key, PRNGKey, Query, Value, Weights
from transformer.nn._masks import Mask
from transformer.nn._partitioning import constrain, explicit_spec, in_auto_axes
from transformer.nn.kernels import ALL_KERNELS, choose
from transformer.nn.kernels._arguments import (
    bias_function,
    check_dropout,
    check_shapes,
    checked_mask,
    with_one_batch_axis,
)
from transformer.nn.kernels._contract import AttentionShapes, AttentionSpec, BiasFunction, Kernel


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    mask: Mask | Array | None = None,
    bias: BiasFunction | Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKey | None = None,
    implementation: str = "auto",
    return_weights: bool = False,
) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "*B T N Hv"], Float[Array, "*B N T S"]]:
    """Compute softmax(scale Q K^T + bias + mask) V for every head (Vaswani et al. 2017, section 3.2.1, equation 1).

    The softmax is computed in float32. `compat.dot_product_attention` has the arguments of Flax's function.

    Args:
        query: (B, T, N, H). B may stand for any number of batch axes. N must be a multiple of K: each key/value head
            serves N / K query heads (grouped-query attention, Ainslie et al. 2023).
        key: (B, S, K, H).
        value: (B, S, K, Hv); Hv may differ from H.
        mask: a `Mask`, or a boolean array that broadcasts to (B, N, T, S); True means that the query attends to the
            key (`Mask.array` lists the accepted arrays). The output of a query that attends to no key is 0.
        bias: added to the scores: an array that broadcasts to (B, N, T, S), or a function (query indices (t,), key
            indices (s,)) -> that block of the bias. With a function, blockwise kernels never store the full bias.
        scale: factor on the scores; None: 1 / sqrt(H); 1.0: unscaled attention.
        softcap: replaces the scores by softcap tanh(scores / softcap), before bias and mask (Gemma 2, arXiv
            2408.00118).
        sinks: (N,), one logit per head that takes part in the softmax but has no value (Xiao et al. 2023, arXiv
            2309.17453).
        dropout_rate: fraction of the weights set to zero; needs `dropout_key`.
        dropout_key: random key of the dropout.
        implementation: name of a kernel in `transformer.nn.kernels`, or "auto".
        return_weights: also return the softmax weights, before dropout.

    Returns:
        The attended values (B, T, N, Hv); with `return_weights`, a pair of these and the softmax weights (B, N, T, S).

    Raises:
        ValueError: shapes that don't fit, a dropout rate without a key, or a kernel that does not support an option.
    """
    spec = AttentionSpec(
        mask=mask,
        bias=bias,
        sinks=sinks,
        dropout_key=dropout_key,
        scale=score_scale(scale, query.shape[-1]),
        softcap=softcap,
        dropout_rate=dropout_rate,
        return_weights=return_weights,
    )
    out, weights = attend(query, key, value, spec, implementation)
    return (out, weights) if return_weights else out


def attend(
    query: Array, key: Array, value: Array, spec: AttentionSpec, implementation: str = "auto"
) -> tuple[Array, Array | None]:
    """Compute `dot_product_attention` with the options of `spec`, whose mask and bias may be arrays.

    Returns:
        The attended values (B, T, N, Hv), and the weights (B, N, T, S) if `spec.return_weights`, else None.
    """
    # Shapes in the comments: query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv), scores (B, N, T, S).
    check_shapes(query, key, value, spec.sinks)
    check_dropout(spec.dropout_rate, spec.dropout_key)
    if not spec.scale > 0:
        raise ValueError(f"scale must be above 0, got {spec.scale}. Use scale=1.0 for unscaled attention.")

    # Kernels expect exactly one batch axis: merge all leading axes here, restore them below.
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

    # All kernels compute the same formula; the reference kernel in `kernels/_reference.py` writes it out.
    kernel = ALL_KERNELS[choose(implementation, spec)]
    length = "length" if kernel.split_keys else None  # most kernels need the full length of a row on each device
    key, value = (constrain(array, "batch", length, "kv_heads", "head_dim") for array in (key, value))
    out, weights = _run(kernel, query, key, value, spec)
    # Restore the caller's batch axes.
    if len(lead) != 1:
        out, weights = (a if a is None else a.reshape(*lead, *a.shape[1:]) for a in (out, weights))
    return out, weights


def score_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor on the scores: `scale`, or 1 / sqrt(H) for None."""
    # q . k is a sum of H terms. For entries of mean 0 and variance 1 its variance is H, so dividing by sqrt(H)
    # restores variance 1 and keeps the softmax from saturating (Vaswani et al. 2017, section 3.2.1, footnote 4).
    return 1.0 / math.sqrt(head_dim) if scale is None else scale


def _run(kernel: Kernel, query: Query, key: Key, value: Value, spec: AttentionSpec) -> tuple[Attended, Weights | None]:
    """Call the kernel, also under a mesh with Explicit axes: there the output is sharded like the query.

    Under such a mesh, a bias function that reads arrays must be a pytree with these arrays as leaves.

    Returns:
        The attended values (B, T, N, Hv), and the weights (B, N, T, S) if `spec.return_weights`, else None.
    """

    def attended(query, key, value, spec):
        out, weights = kernel.run(query, key, value, spec)
        return (out, weights) if spec.return_weights else (out,)

    sharding = explicit_spec(query)
    if sharding is not None:
        rows, length, heads, _ = sharding
        # The output (B, T, N, Hv) and the weights (B, N, T, S)
        specs = PartitionSpec(rows, length, heads, None), PartitionSpec(rows, heads, length, None)
        attended = in_auto_axes(attended, specs if spec.return_weights else specs[:1])
    out, *weights = attended(query, key, value, spec)
    if not kernel.residuals:  # a kernel with residuals stores its output among them: one copy is enough
        out = checkpoint_name(out, "attention_output")
    return out, weights[0] if weights else None
