"""Attention: the pure function, and the module that owns its projections."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from transformer.nn._axes import (
    Array,
    Attended,
    Context,
    DType,
    Float,
    Hidden,
    Int,
    Key,
    Positions,
    PRNGKey,
    Query,
    Value,
    Weights,
)
from transformer.nn._caches import ContextCache, KVCache
from transformer.nn._layers import NORMS, Initializer, Linear, is_deterministic
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import constrain, explicit_spec, in_auto_axes
from transformer.nn._positions import NoPosition, PositionScheme
from transformer.nn.kernels import ALL_KERNELS, choose
from transformer.nn.kernels._contract import AttentionShapes, AttentionSpec, BiasFunction, Kernel, bias_block


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
    dropout_rng: PRNGKey | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    module: nn.Module | None = None,
) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "*B T N Hv"], Float[Array, "*B N T S"]]:
    """softmax(scale Q K^T + bias + mask) V for every head (Vaswani et al. 2017, section 3.2.1), softmax in float32:
    (B, T, N, Hv), or a pair with the weights. B may be any number of axes.

    The last four arguments are those that Flax's attention modules pass to their `attention_fn`, which this function
    can be.

    Args:
        query: (B, T, N, H); N a multiple of K: each key head serves N / K query heads (Ainslie et al. 2023).
        key: (B, S, K, H).
        value: (B, S, K, Hv); Hv may differ from H.
        mask: a `Mask`, or a boolean array that broadcasts to (B, N, T, S); True attends (`Mask.array` says what else
            it takes). A query without keys gets 0.
        bias: added to the scores: an array that broadcasts to (B, N, T, S), or a function (query indices (t,), key
            indices (s,)) -> that block of it, so that blockwise kernels never hold all of it.
        scale: factor on the scores; None: 1 / sqrt(H); 1.0: unscaled attention.
        softcap: scores become softcap tanh(scores / softcap), before bias and mask (Gemma 2, arXiv 2408.00118).
        sinks: one logit a head that takes part in the softmax and has no value (Xiao et al. 2023, arXiv 2309.17453).
        dropout_rate: share of the weights set to zero; needs `dropout_key`.
        implementation: a kernel of `transformer.nn.kernels`, or "auto".
        return_weights: also return the softmax weights (B, N, T, S), before dropout.
        dropout_rng: Flax's name of `dropout_key`.
        broadcast_dropout: drop the same weights (T, S) in all rows and heads.
        deterministic: True ignores `dropout_rate`.
        module: sows the softmax weights as `attention_weights` into its collection "intermediates".

    Raises:
        ValueError: shapes that don't fit, a rate without a key, or a kernel that can't do what is asked.
    """
    _check_shapes(query, key, value, sinks)
    dropout_rate, dropout_key = _dropout(dropout_rate, dropout_key, dropout_rng, deterministic)
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}. Use scale=1.0 for unscaled attention.")

    # Kernels have one batch axis
    lead = query.shape[:-3]
    if len(lead) != 1:
        query, key, value = (array.reshape(math.prod(lead), *array.shape[-3:]) for array in (query, key, value))
        mask, bias = (_with_one_batch_axis(array, lead) for array in (mask, bias))
    (batch, num_queries, num_heads, head_dim), num_keys = query.shape, key.shape[1]
    sizes = (batch, num_heads, num_queries, num_keys)

    # What to compute, and the kernel that computes it
    spec = AttentionSpec(
        mask=_checked_mask(mask, sizes).with_padding_as_segments(num_queries),
        bias=_bias_function(bias, sizes),
        sinks=sinks,
        dropout_key=dropout_key,
        # Keeps the variance of the scores at 1 for queries and keys of variance 1 (Vaswani et al. 2017, section 3.2.1)
        scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        softcap=softcap,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout and dropout_rate > 0.0,
        return_weights=return_weights or module is not None,
        shapes=AttentionShapes.of(query, key, value),
    )
    kernel = ALL_KERNELS[choose(implementation, spec)]
    length = "length" if kernel.split_keys else None  # most kernels need all keys of a row on each device
    key, value = (constrain(array, "batch", length, "kv_heads", "head_dim") for array in (key, value))
    out, weights = _run(kernel, query, key, value, spec)

    # The shape and the weights that the caller asked for
    if len(lead) != 1:
        out, weights = (a if a is None else a.reshape(*lead, *a.shape[1:]) for a in (out, weights))
    if module is not None:
        module.sow("intermediates", "attention_weights", weights.astype(query.dtype))
    return (out, weights) if return_weights else out


def _run(kernel: Kernel, query: Query, key: Key, value: Value, spec: AttentionSpec) -> tuple[Attended, Weights | None]:
    """Call the kernel; inside a mesh with Explicit axes too, where the result (B, T, N, Hv) is split as the query is.

    There a bias that reads arrays must be a pytree with these arrays as leaves.
    """

    def attended(query, key, value, spec):
        out, weights = kernel.run(query, key, value, spec)
        return (out, weights) if spec.return_weights else (out,)

    sharding = explicit_spec(query)
    if sharding is not None:
        rows, length, heads, _ = sharding
        specs = PartitionSpec(rows, length, heads, None), PartitionSpec(rows, heads, length, None)
        attended = in_auto_axes(attended, specs if spec.return_weights else specs[:1])
    out, *weights = attended(query, key, value, spec)
    return out, weights[0] if weights else None


def _check_shapes(query: Array, key: Array, value: Array, sinks: Array | None) -> None:
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
    if query.shape[-2] % key.shape[-2]:
        problems.append("query heads must be a multiple of key heads")
    if sinks is not None and sinks.shape != query.shape[-2:-1]:
        problems.append(f"sinks {sinks.shape} must be one number a query head")
    if problems:
        shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
        raise ValueError(f"attention can't be computed of {shapes}: {'; '.join(problems)}.")


def _dropout(
    rate: float, key: PRNGKey | None, rng: PRNGKey | None, deterministic: bool
) -> tuple[float, PRNGKey | None]:
    """The rate in force and its key, which Flax calls `rng`. ValueError: both names, a bad rate, or no key for it."""
    if rng is not None and key is not None:
        raise ValueError("dropout_rng is another name of dropout_key: pass one of them.")
    key = key if rng is None else rng
    rate = 0.0 if deterministic else rate
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be at least 0 and below 1, got {rate}.")
    if rate > 0.0 and key is None:
        raise ValueError("dropout_rate is above 0 but dropout_key is None: pass a jax.random.key, or dropout_rate=0.")
    return rate, key


def _checked_mask(mask: Mask | Array | None, sizes: tuple[int, int, int, int]) -> Mask:
    """The mask as a `Mask` that fits (B, N, T, S). A one-dimensional array masks keys."""
    if mask is not None and not isinstance(mask, Mask) and np.ndim(mask) <= 1:
        mask = mask[None]
    mask = Mask.of(mask)
    mask.check(*sizes)
    return mask


def _with_one_batch_axis(array: Any, lead: tuple[int, ...]) -> Any:
    """Of an array that broadcasts to (*lead, N, T, S) one that broadcasts to (B, N, T, S); anything else as it is."""
    if array is None or isinstance(array, Mask) or not hasattr(array, "shape") or array.ndim <= 3:
        return array
    batch, rest = (1,) * (len(lead) + 3 - array.ndim) + array.shape[:-3], array.shape[-3:]
    if math.prod(batch) == 1:
        return array.reshape(1, *rest)
    return jnp.broadcast_to(array.reshape(*batch, *rest), (*lead, *rest)).reshape(math.prod(lead), *rest)


def _bias_function(bias: BiasFunction | Array | None, shape: tuple[int, int, int, int]) -> BiasFunction | None:
    if bias is None or isinstance(bias, jax.tree_util.Partial):
        return bias
    if callable(bias) and not hasattr(bias, "shape"):
        return jax.tree_util.Partial(bias)  # a pytree; arrays that the function closes over are no leaves of it
    bias = jnp.asarray(bias)
    if bias.ndim > 4 or any(size not in (1, whole) for size, whole in zip(bias.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(f"the bias of shape {bias.shape} doesn't broadcast to (B, N, T, S) = {shape}.")
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    bias = jnp.broadcast_to(bias, (*bias.shape[:2], *shape[2:]))
    return jax.tree_util.Partial(_bias_of, bias)


def _bias_of(bias: Array, queries: Array, keys: Array) -> Array:
    return bias[:, :, queries][:, :, :, keys]


def _sum_of_biases(bias: BiasFunction | None, more: BiasFunction | None) -> BiasFunction | None:
    if bias is None or more is None:
        return more if bias is None else bias
    return jax.tree_util.Partial(_sum_of_blocks, bias, more)


def _sum_of_blocks(bias: BiasFunction, more: BiasFunction, queries: Array, keys: Array) -> Array:
    return bias_block(bias, queries, keys) + bias_block(more, queries, keys)


class AttentionModule(nn.Module, kw_only=True):
    """What attention modules share (Vaswani et al. 2017, section 3.2): how scores are made of queries and keys, and the
    way to the attended values.

    `softcap`, `dropout_rate` and `implementation` are those of `dot_product_attention`. `kernel_init` draws all kernels
    as matrices (`Linear`; None: Glorot uniform), except `out` when `output_init` is given.
    """

    scale: float | None = None
    """factor on the scores; None: 1 / sqrt(H)"""
    softcap: float | None = None
    dropout_rate: float = 0.0
    position: PositionScheme = NoPosition()
    """position scheme: rotates queries and keys, biases scores"""
    kernel_init: Initializer | None = None
    output_init: Initializer | None = None
    implementation: str = "auto"
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.nowrap
    def attended(
        self,
        attend: Callable[..., Any],
        *arrays: Array,
        scale: float | None,
        deterministic: bool | None,
        sow_weights: bool,
        **options: Any,
    ) -> Float[Array, "B T N Hv"]:
        """`attend(*arrays, **options)` (B, T, N, Hv), `dot_product_attention` or a function with its options, with the
        options of this module. Sows the weights if `sow_weights` and the collection "intermediates" is mutable.
        """
        sown = sow_weights and self.is_mutable_collection("intermediates") and not self.is_initializing()
        dropout_rate = 0.0 if is_deterministic(self, deterministic, self.dropout_rate) else self.dropout_rate
        out = attend(
            *arrays,
            scale=scale,
            softcap=self.softcap,
            dropout_rate=dropout_rate,
            dropout_key=self.make_rng("dropout") if dropout_rate > 0.0 else None,
            implementation=self.implementation,
            return_weights=sown,
            **options,
        )
        if sown:
            out, weights = out
            self.sow("intermediates", "weights", weights)
        return checkpoint_name(constrain(out, "batch", "length", "heads", "head_dim"), "attention_output")


class MultiHeadAttention(AttentionModule):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): self-attention, or cross-attention when given a
    context.

    Each projection makes all heads in one matrix product: parameters `query` (D, N, H), `key` (Dc, K, H), `value`
    (Dc, K, Hv) and `out` (N, Hv, out_features), each a `kernel` and, with `use_bias`, a `bias`. `num_heads` is N;
    `norm_epsilon` and `qk_norm_kind`, a name of `NORMS`, belong to `qk_norm`. Further fields are those of
    `AttentionModule`.
    """

    parameter_axes = declare(
        {
            "query/kernel": "embed -> heads _",
            "query/bias": "heads _",
            "key/kernel": "embed -> heads _",
            "key/bias": "heads _",
            "value/kernel": "embed -> heads _",
            "value/bias": "heads _",
            "out/kernel": "heads _ -> embed",
            "out/bias": "embed",
            "sinks": "heads",
        }
    )

    num_heads: int
    num_kv_heads: int | None = None
    """None: num_heads"""
    head_dim: int | None = None
    """None: width of x / num_heads"""
    value_dim: int | None = None
    """None: head_dim"""
    out_features: int | None = None
    """None: width of x"""
    use_bias: bool = True
    biases: tuple[str, ...] | None = None
    """which of query, key, value and out have a bias; None: as use_bias says"""
    qk_norm: bool = False
    """RMSNorm on each query and key head (Henry et al. 2020, arXiv 2010.04245; as in Qwen 3 and Gemma 3)"""
    qk_norm_scope: str = "head"
    """all: over all heads of a token together (OLMo Team 2024, arXiv 2501.00656, section 3.2)"""
    qk_norm_kind: str = "rms_norm"
    sinks: bool = False
    """learn one logit a head that takes weight and gives no value"""
    norm_epsilon: float = 1e-6

    @nn.compact
    def __call__(
        self,
        x: Hidden,
        context: Context | None = None,
        *,
        mask: Mask | Array | None = None,
        positions: Positions | None = None,
        position_table: Float[Array, "R W"] | None = None,
        cache: KVCache | ContextCache | None = None,
        bias: BiasFunction | Array | None = None,
        deterministic: bool | None = None,
        sow_weights: bool = False,
    ) -> tuple[Float[Array, "B T Do"], KVCache | ContextCache | None]:
        """Attends from x (B, T, D) to itself, or to `context` (B, S, Dc); returns (B, T, out_features) and the cache.
        ValueError: sizes that don't fit.

        Args:
            mask: which query attends which key, a `Mask` or an array that broadcasts to (B, N, T, S); causality is not
                implied. With a `KVCache`, S is the length of the cache.
            positions: (B, T), for the position scheme; None: 0, 1, 2, ... after what the cache holds.
            position_table: the scheme's learnt table, if it has one.
            cache: a `KVCache` to append to and attend over; or a `ContextCache`, filled when `context` is given and
                read when it is not.
            bias: added to the scores and to the position scheme's bias, as in `dot_product_attention`.
            deterministic: True evaluates; False drops weights (rng "dropout"). Required if `dropout_rate` is above 0.
            sow_weights: sow the attention weights (B, N, T, S), before dropout, as `weights` into the collection
                "intermediates"; needs a kernel that has them ("reference", which "auto" then chooses).
        """
        self._check(x, context, cache)
        mask, head_dim = Mask.of(mask), self._head_dim(x)
        query = constrain(self._project("query", x, (self.num_heads, head_dim)), "batch", "length", "heads", "head_dim")
        if self.qk_norm:
            query = self._normalize("query_norm", query)

        if context is None and not isinstance(cache, ContextCache):
            # Self-attention: keys of x at its positions, after those that the cache holds
            key, value = self._keys_and_values(x, None, head_dim)
            if positions is None:
                positions = jnp.arange(x.shape[1])[None, :]
                positions = positions if cache is None else positions + cache.length[:, None]
            positions = jnp.broadcast_to(positions, x.shape[:2])
            query, key = self.position.rotate(query, positions), self.position.rotate(key, positions)
            key_positions = positions
            if cache is not None:
                start, cache = cache.length, cache.append(key, value, positions)
                (key, value), key_positions = cache.whole(), cache.positions
                mask = mask.shifted(start) & Mask.lengths(cache.length)
            sizes = (x.shape[0], self.num_heads, x.shape[1], key.shape[1])
            bias = _sum_of_biases(_bias_function(bias, sizes), self._bias(positions, key_positions, position_table))
        elif context is None:
            # Cross-attention to the keys and values of an earlier call
            key, value = cache.whole()
        else:
            key, value = self._keys_and_values(x, context, head_dim)
            cache = None if cache is None else ContextCache.of(key, value)

        sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,), self.param_dtype) if self.sinks else None
        out = self.attended(
            dot_product_attention,
            query,
            key,
            value,
            scale=self.scale,
            mask=mask,
            bias=bias,
            sinks=sinks,
            deterministic=deterministic,
            sow_weights=sow_weights,
        )
        features = x.shape[-1] if self.out_features is None else self.out_features
        return self._project("out", out, (features,), contract=2), cache

    def _head_dim(self, x: Hidden) -> int:
        """H, size of a head of queries and keys. ValueError: none is given, and the width of x does not divide."""
        if self.head_dim is None and x.shape[-1] % self.num_heads:
            raise ValueError(
                f"the width of x ({x.shape[-1]}) must be a multiple of num_heads ({self.num_heads}) when head_dim "
                f"is not given. Give head_dim, or change one of them."
            )
        return x.shape[-1] // self.num_heads if self.head_dim is None else self.head_dim

    def _keys_and_values(
        self, x: Hidden, context: Context | None, head_dim: int
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
        """Keys and values of the context (B, S, Dc), or of x (B, S, D) without one; keys are not rotated yet."""
        value_dim = head_dim if self.value_dim is None else self.value_dim
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        source = x if context is None else context
        key = self._project("key", source, (kv_heads, head_dim))
        value = self._project("value", source, (kv_heads, value_dim))
        return (self._normalize("key_norm", key) if self.qk_norm else key), value

    def _check(self, x: Array, context: Array | None, cache: KVCache | ContextCache | None) -> None:
        if unknown := set(self.biases or ()) - {"query", "key", "value", "out"}:
            raise ValueError(f"biases must be of query, key, value and out, got {unknown.pop()!r}.")
        for name, array in {"x": x, "context": context}.items():
            if array is not None and array.ndim != 3:
                got = f"got shape {array.shape}. A single sequence is {name}[None]."
                raise ValueError(f"{name} must be (batch, length, width), {got}")
        if isinstance(cache, KVCache) and context is not None:
            raise ValueError("a KVCache is of self-attention, and this one has a context. Give a ContextCache.")
        if isinstance(cache, ContextCache) and context is None and cache.key is None:
            raise ValueError("this cross-attention cache is empty: give context at the first call.")
        if not isinstance(self.position, PositionScheme):
            raise ValueError(
                f"position must be a scheme such as Rotary() or ALiBi(num_heads=8), got {self.position!r}."
            )
        if context is not None and type(self.position) is not NoPosition:
            raise ValueError(
                f"{type(self.position).__name__} is for self-attention, but a context is given: positions of x and of "
                f"the context have no common origin. Leave the context out to attend from x to itself, or "
                f"use position=NoPosition()."
            )
        if self.position.adds:
            scheme = type(self.position).__name__
            raise ValueError(
                f"{scheme} is added to embeddings, and attention turns queries and keys or biases scores: it would do "
                f"nothing here. Add it to x before ({scheme}.add), or take Rotary, ALiBi or T5Bias."
            )

    def _project(self, name: str, x: Array, features: tuple[int, ...], contract: int = 1) -> Array:
        init = (self.output_init or self.kernel_init) if name == "out" else self.kernel_init
        use_bias = self.use_bias if self.biases is None else name in self.biases
        return Linear(features, contract, use_bias, init, self.dtype, self.param_dtype, name=name)(x)

    def _normalize(self, name: str, heads: Array) -> Array:
        norm = NORMS[self.qk_norm_kind](self.norm_epsilon, self.dtype, self.param_dtype, name=name)
        if self.qk_norm_scope == "head":
            return norm(heads)
        return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)

    def _bias(self, positions: Positions, key_positions: Int[Array, "B S"], table: Array | None) -> BiasFunction | None:
        probe = jax.eval_shape(lambda: self.position.bias(positions[:, :1], key_positions[:, :1], table))
        if probe is None:
            return None
        if probe.shape[1] not in (1, self.num_heads):
            raise ValueError(
                f"{type(self.position).__name__} biases {probe.shape[1]} heads, but there are {self.num_heads}. "
                f"Give it num_heads={self.num_heads}."
            )
        return jax.tree_util.Partial(functools.partial(_position_bias, self.position), positions, key_positions, table)


def _position_bias(
    scheme: PositionScheme, positions: Array, key_positions: Array, table: Array | None, queries: Array, keys: Array
) -> Array:
    return scheme.bias(positions[:, queries], key_positions[:, keys], table)
