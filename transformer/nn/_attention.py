"""`MultiHeadAttention`, which owns the projections; `kernels/_dot_product.py` has attention as a pure function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.config._parts import QueryTemperature
from transformer.nn._axes import (
    Array,
    Attended,
    Bool,
    Context,
    Coordinates,
    DType,
    Float,
    Hidden,
    Int,
    Lengths,
    Positions,
    Query,
    Weights,
)
from transformer.nn._caches import ContextCache, SelfAttentionCache, of_layer
from transformer.nn._masks import Mask, real_tokens
from transformer.nn._paged import PagedKVCache
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import constrain
from transformer.nn._positions import NoPosition, PositionScheme
from transformer.nn.kernels._arguments import bias_function, sum_of_biases
from transformer.nn.kernels._contract import AttentionSpec, BiasFunction
from transformer.nn.kernels._dot_product import score_scale
from transformer.nn.kernels._keys_values import KeysValues
from transformer.nn.layers._layers import NORMS, Initializer, Linear, is_deterministic, unscaled_rms_norm
from transformer.nn.layers._quantization import Quantization

Attend: TypeAlias = Callable[[Query, AttentionSpec, str], tuple[Attended, Weights | None]]
"""(query (B, T, N, H), options, name of a kernel) -> the attended values, and the weights if they are asked for"""


class AttentionModule(nn.Module, kw_only=True):
    """Base class of attention modules: options that all of them share, and the call of the attention function.

    `softcap`, `dropout_rate` and `implementation` are those of `dot_product_attention`. `kernel_init` initializes all
    kernels as matrices (see `Linear`; None: Glorot uniform), except `out` when `output_init` is given.
    """

    scale: float | None = None
    """factor on the scores; None: 1 / sqrt(H)"""
    softcap: float | None = None
    dropout_rate: float = 0.0
    position: PositionScheme = NoPosition()
    """position scheme: rotates queries and keys, or adds a bias to the scores"""
    kernel_init: Initializer | None = None
    output_init: Initializer | None = None
    implementation: str = "auto"
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32
    quantization: Quantization | None = None
    """which projections have quantized factors; None: none"""

    @nn.nowrap
    def attended(
        self,
        attend: Attend,
        query: Query,
        *,
        scale: float,
        mask: Mask,
        bias: BiasFunction | Array | None,
        sinks: Float[Array, " N"] | None = None,
        deterministic: bool | None,
        sow_weights: bool,
    ) -> Attended:
        """Return `attend(query, spec, implementation)` (B, T, N, Hv), called with this module's options.

        Sows the weights (B, N, T, S), before dropout, as `weights`, if `sow_weights` is True and the collection
        "intermediates" is mutable. The other arguments are those of `dot_product_attention`.
        """
        # Ask for weights only if they are collected: most kernels never compute the full (B, N, T, S) matrix.
        sown = sow_weights and self.is_mutable_collection("intermediates") and not self.is_initializing()
        dropout_rate = 0.0 if is_deterministic(self, deterministic, self.dropout_rate) else self.dropout_rate
        spec = AttentionSpec(
            mask=mask,
            bias=bias,
            sinks=sinks,
            dropout_key=self.make_rng("dropout") if dropout_rate > 0.0 else None,
            scale=scale,
            softcap=self.softcap,
            dropout_rate=dropout_rate,
            return_weights=sown,
        )
        out, weights = attend(query, spec, self.implementation)
        if sown:
            self.sow("intermediates", "weights", weights)
        out = out.astype(query.dtype)  # a cache may have float32 for 16-bit numbers
        # The name lets the remat policy "names" (`_stacks.py`) store this array instead of recomputing it.
        return constrain(out, "batch", "length", "heads", "head_dim")


def nan_without_room(out: Hidden, fits: Bool[Array, "B T"], mask: Mask) -> Hidden:
    """Return the result (B, T, D) of attention with a cache, NaN where keys are missing because the cache is full.

    Args:
        out: (B, T, D).
        fits: (B, T), which tokens have a slot (`SelfAttentionCache.fits`).
        mask: the mask of the tokens. If it is causal, a token that fits reads no token that doesn't.
    """
    # Without causality each token of the row may read the missing keys: (B, T) -> (B, 1).
    if not mask.is_causal or mask.query_groups is not None or mask.query_places is not None:
        fits = fits.all(1, keepdims=True)
    return jnp.where(fits[:, :, None], out, jnp.nan)


def count_tokens(x: Hidden, cache: SelfAttentionCache | None) -> SelfAttentionCache | None:
    """Advance the cache of a layer without own keys by the T tokens of x (B, T, D): it only counts tokens."""
    if cache is None:
        return None
    nothing = jnp.zeros((*x.shape[:2], 0, 0), x.dtype)  # (B, T, K = 0, H = 0)
    return cache.append(nothing, nothing, jnp.zeros(x.shape[:2], jnp.int32))


class MultiHeadAttention(AttentionModule):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): self-attention, or cross-attention to a context.

    Each projection computes all heads in one matrix multiplication. Parameters: `query` (D, N, H), `key` (Dc, K, H),
    `value` (Dc, K, Hv) and `out` (N, Hv, out_features), each with a `kernel` and, with `use_bias`, a `bias`.
    `num_heads` is N. With `output_gate`, also `output_gate/kernel` (D, N, Hv).

    `norm_epsilon` and `qk_norm_kind`, a name in `NORMS`, apply to `qk_norm`. The other fields are
    those of `AttentionModule`.
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
            "output_gate/kernel": "embed -> heads _",
            "sinks": "heads",
        }
    )

    num_heads: int
    num_kv_heads: int | None = None
    """number K of key/value heads; None: num_heads"""
    head_dim: int | None = None
    """size H of a query or key head; None: width of x / num_heads"""
    value_dim: int | None = None
    """size Hv of a value head; None: head_dim"""
    out_features: int | None = None
    """width of the output; None: width of x"""
    use_bias: bool = True
    biases: tuple[str, ...] | None = None
    """which of query, key, value and out have a bias; None: all of them or none, as `use_bias` selects"""
    qk_norm: bool = False
    """normalize queries and keys with an RMSNorm (Henry et al. 2020, arXiv 2010.04245; as in Qwen 3 and Gemma 3)"""
    qk_norm_scope: str = "head"
    """head: normalize each head separately; all: normalize all heads of a token together (OLMo Team 2024, arXiv
    2501.00656, section 3.2)"""
    qk_norm_kind: str = "rms_norm"
    qk_norm_scale: bool = True
    """learn a factor for each number of the normalized queries and keys; false: no parameters"""
    value_norm: bool = False
    """normalize each value head with an RMSNorm without parameters"""
    keys_as_values: bool = False
    """values are the projected keys, before their norm and rotation: there is no projection of values"""
    stores_kv: bool = False
    """return the `KeysValues`, which contain the cache, in its place: for later layers"""
    temperature: QueryTemperature | None = None
    """factor on the queries that grows with their position"""
    output_gate: bool = False
    """multiply the attended values by the sigmoid of a projection of x (Qiu et al. 2025, arXiv 2505.06708)"""
    sinks: bool = False
    """learn one logit per head that takes part in the softmax but has no value"""
    norm_epsilon: float = 1e-6

    @nn.compact
    def __call__(
        self,
        x: Hidden,
        context: Context | None = None,
        *,
        mask: Mask | Array | None = None,
        positions: Coordinates | None = None,
        position_table: Float[Array, "R W"] | None = None,
        cache: SelfAttentionCache | ContextCache | None = None,
        stored: KeysValues | None = None,
        bias: BiasFunction | Array | None = None,
        deterministic: bool | None = None,
        sow_weights: bool = False,
    ) -> tuple[Float[Array, "B T Do"], Any]:
        """Attend from x (B, T, D) to x itself, or to `context` (B, S, Dc).

        Args:
            x: (B, T, D), the source of the queries.
            context: (B, S, Dc), the source of keys and values; None: x.
            mask: which query attends to which key: a `Mask`, or an array that broadcasts to (B, N, T, S). It is not
                causal by default. With a `KVCache` or `PagedKVCache`, S is the number of its slots per row.
            positions: (B, T), for the position scheme, or (B, T, A) for a scheme with several coordinates; None: 0, 1,
                2, ..., counted from the end of the cache.
            position_table: the learned table of the scheme, if it has one.
            cache: a `KVCache` or `PagedKVCache`, to which keys and values are appended and whose keys are attended to;
                or a `ContextCache`, which is filled when `context` is given and read otherwise.
            stored: keys and values of an earlier layer, which replace own ones; `cache` then only counts tokens.
            bias: added to the scores in addition to the bias of the position scheme, as in `dot_product_attention`.
            deterministic: True disables dropout; False enables it (rng "dropout"). Required if `dropout_rate` is above
                0.
            sow_weights: sow the attention weights (B, N, T, S), before dropout, as `weights` in the collection
                "intermediates". This needs a kernel that computes them: "reference", which "auto" then selects.

        Returns:
            The output (B, T, out_features), and the updated cache. Inside jit, the output of tokens that don't fit the
            cache is NaN.

        Raises:
            ValueError: sizes that don't fit; outside jit, tokens that don't fit the cache.
        """
        self._check(x, context, cache)
        mask, head_dim, fits = Mask.of(mask), self._head_dim(x), None
        # Q = x W_Q for all heads: (B, T, D) x (D, N, H) -> (B, T, N, H)
        query = constrain(self._project("query", x, (self.num_heads, head_dim)), "batch", "length", "heads", "head_dim")
        if self.qk_norm:
            query = self._normalize("query_norm", query)

        if context is None and not isinstance(cache, ContextCache):
            if positions is None:
                # With a cache, token t is at position length + t: a decoding step sees only the new token.
                positions = jnp.arange(x.shape[1])[None, :]
                positions = positions if cache is None else positions + cache.row_lengths[:, None]
            coordinates = jnp.broadcast_to(positions, (*x.shape[:2], *positions.shape[2:]))
            positions = largest_coordinate(coordinates)
            query = query if self.temperature is None else _heated(self.temperature, query, positions)
            if stored is None:
                # Self-attention: keys and values come from x, K = x W_K (B, T, K, H) and V = x W_V (B, T, K, Hv).
                key, value = self._keys_and_values(x, None, head_dim)
                fits = None if cache is None else cache.fits(x.shape[1])
                query, attended_to = self._with_cache(query, key, value, coordinates, mask, cache)
                cache = attended_to.cache
            else:
                query, attended_to = _rotated(self.position, query, coordinates, None), stored
                cache = count_tokens(x, cache)
            key_positions = attended_to.positions
            sizes = (x.shape[0], self.num_heads, x.shape[1], key_positions.shape[1])
            bias = sum_of_biases(bias_function(bias, sizes), self._bias(positions, key_positions, position_table))
        elif context is None:
            # Cross-attention to the context of an earlier call: its keys and values do not change between steps.
            attended_to = KeysValues(*cache.whole())
        else:
            # Cross-attention: queries come from x, keys and values from the context (section 3.2.3).
            # No positions: distances between the two sequences have no meaning, so nothing is rotated or biased.
            key, value = self._keys_and_values(x, context, head_dim)
            attended_to, cache = KeysValues(key, value), None if cache is None else ContextCache.of(key, value)

        # weight_s = exp(S_s) / (exp(sink) + sum_j exp(S_j)): with a sink the weights sum to less than 1, so a head can
        # attend to nothing. All sinks start at logit 0.
        sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,), self.param_dtype) if self.sinks else None
        out = self.attended(
            attended_to.attend,
            query,
            scale=score_scale(self.scale, head_dim),
            mask=mask,
            bias=bias,
            sinks=sinks,
            deterministic=deterministic,
            sow_weights=sow_weights,
        )
        if self.output_gate:
            # (B, T, N, Hv), before the output projection
            out = out * jax.nn.sigmoid(self._project("output_gate", x, out.shape[2:]))
        features = x.shape[-1] if self.out_features is None else self.out_features
        # Concat(head_1, ..., head_N) W_O: (B, T, N, Hv) x (N, Hv, Do) -> (B, T, Do), contracting both N and Hv.
        out = self._project("out", out, (features,), contract=2)
        out = out if fits is None else nan_without_room(out, fits, mask)
        return out, attended_to if self.stores_kv else cache

    @nn.nowrap
    def _with_cache(
        self, query: Array, key: Array, value: Array, coordinates: Array, mask: Mask, cache: SelfAttentionCache | None
    ) -> tuple[Query, KeysValues]:
        """Rotate queries and keys (B, T, N, H) by their positions, (B, T) or (B, T, A), and append to the cache."""
        # Rotate before appending to the cache: each key is rotated once, by its own position, and never again. (R_m q)
        # . (R_n k) = q . (R_(n - m) k) depends on the difference of positions alone (Su et al. 2021, section 3.2.2). A
        # scheme that depends on the length rotates all keys again when the text grows, so the cache stores them before
        # rotation.
        start = None if cache is None else cache.row_lengths
        positions = largest_coordinate(coordinates)
        lengths = text_lengths(positions, mask, cache) if self.position.by_length else None
        query = _rotated(self.position, query, coordinates, lengths)
        if cache is None:
            key = _rotated(self.position, key, coordinates, lengths)
            return query, KeysValues(key, value, positions)
        if not self.position.by_length:
            cache = cache.append(_rotated(self.position, key, coordinates, lengths), value, positions)
            return query, KeysValues(None, None, cache.key_positions, cache, start)
        cache = cache.append(key, value, positions)
        key, value = cache.whole()
        key = _rotated(self.position, key, cache.key_positions, lengths)
        return query, KeysValues(key, value, cache.key_positions, cache, start)

    def _head_dim(self, x: Hidden) -> int:
        if self.head_dim is None and x.shape[-1] % self.num_heads:
            raise ValueError(
                f"the width of x ({x.shape[-1]}) must be a multiple of num_heads ({self.num_heads}) when head_dim "
                f"is not given. Pass head_dim, or change one of the two."
            )
        return x.shape[-1] // self.num_heads if self.head_dim is None else self.head_dim

    def _keys_and_values(
        self, x: Hidden, context: Context | None, head_dim: int
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
        """Project the context (B, S, Dc), or x (B, S, D) without one, to keys and values. Keys are not rotated yet."""
        # With K < N (grouped-query attention) these kernels and the cache are smaller by N / K. K = 1: multi-query.
        value_dim = head_dim if self.value_dim is None else self.value_dim
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        source = x if context is None else context
        if self.keys_as_values:
            key = value = self._project("key", source, (kv_heads, head_dim))
        else:
            key = self._project("key", source, (kv_heads, head_dim))
            value = self._project("value", source, (kv_heads, value_dim))
        value = unscaled_rms_norm(value, self.norm_epsilon) if self.value_norm else value
        return (self._normalize("key_norm", key) if self.qk_norm else key), value

    def _check(self, x: Array, context: Array | None, cache: SelfAttentionCache | ContextCache | None) -> None:
        if unknown := set(self.biases or ()) - {"query", "key", "value", "out"}:
            raise ValueError(f"biases must be names among query, key, value and out, got {unknown.pop()!r}.")
        for name, array in {"x": x, "context": context}.items():
            if array is not None and array.ndim != 3:
                got = f"got shape {array.shape}. For a single sequence pass {name}[None]."
                raise ValueError(f"{name} must be (batch, length, width), {got}")
        if isinstance(cache, SelfAttentionCache) and context is not None:
            raise ValueError("a KVCache is for self-attention, but a context is given. Pass a ContextCache.")
        if isinstance(cache, SelfAttentionCache):
            cache.check_room(x.shape[1])
        if isinstance(cache, ContextCache) and context is None and cache.key is None:
            raise ValueError("this cross-attention cache is empty: pass context in the first call.")
        if not isinstance(self.position, PositionScheme):
            raise ValueError(
                f"position must be a position scheme such as Rotary() or ALiBi(num_heads=8), got {self.position!r}."
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
                f"{scheme} is added to embeddings; attention only rotates queries and keys or biases scores, so it "
                f"would have no effect here. Add it to x before ({scheme}.add), or use Rotary, ALiBi or T5Bias."
            )

    def _project(self, name: str, x: Array, features: tuple[int, ...], contract: int = 1) -> Array:
        # contract is 1 for (..., D) x (D, N, H), and 2 for (..., N, Hv) x (N, Hv, Do).
        init = (self.output_init or self.kernel_init) if name == "out" else self.kernel_init
        use_bias = self.use_bias if self.biases is None else name in self.biases
        use_bias = use_bias and name != "output_gate"
        options = (self.dtype, self.param_dtype, self.quantization)
        return Linear(features, contract, use_bias, init, *options, name=name)(x)

    def _normalize(self, name: str, heads: Array) -> Array:
        # RMSNorm over a head gives it the length sqrt(H), so |q . k| / sqrt(H) <= sqrt(H) up to the learned scale:
        # scores stay small in training.
        if self.qk_norm_scale:
            norm = NORMS[self.qk_norm_kind](self.norm_epsilon, self.dtype, self.param_dtype, name=name)
        else:
            norm = functools.partial(unscaled_rms_norm, epsilon=self.norm_epsilon)
        if self.qk_norm_scope == "head":
            return norm(heads)  # (B, T, N, H), over H
        return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)  # over N H together

    def _bias(self, positions: Positions, key_positions: Int[Array, "B S"], table: Array | None) -> BiasFunction | None:
        """Return the bias of the position scheme as a function of query and key indices, or None if it has no bias."""
        # Tracing the bias of one query and one key gives its shape without computing anything.
        probe = jax.eval_shape(lambda: self.position.bias(positions[:, :1], key_positions[:, :1], table))
        if probe is None:
            return None
        if probe.shape[1] not in (1, self.num_heads):
            raise ValueError(
                f"{type(self.position).__name__} has a bias for {probe.shape[1]} heads, but num_heads is "
                f"{self.num_heads}. Create it with num_heads={self.num_heads}."
            )
        # A Partial is a pytree: positions and table are its leaves, so they pass through jit, and the table gets a
        # gradient.
        return jax.tree_util.Partial(functools.partial(_position_bias, self.position), positions, key_positions, table)


def largest_coordinate(coordinates: Coordinates) -> Positions:
    """Return one number per token, (B, T), for caches and biases: the next token comes after the largest coordinate."""
    return coordinates if coordinates.ndim == 2 else coordinates.max(2)


def _heated(temperature: QueryTemperature, query: Query, positions: Positions) -> Query:
    """Return queries (B, T, N, H) times 1 + scale ln(1 + floor((p + 1) / length)) of their positions p (B, T)."""
    steps = ((positions + 1) // temperature.length).astype(jnp.float32)
    # 1 for the first length - 1 positions; log1p(n) = ln(1 + n)
    factor = 1.0 + temperature.scale * jnp.log1p(steps)
    return query * factor.astype(query.dtype)[:, :, None, None]


def _rotated(scheme: PositionScheme, heads: Array, positions: Array, lengths: Lengths | None) -> Array:
    return scheme.rotate(heads, positions) if lengths is None else scheme.rotate(heads, positions, lengths)


def text_lengths(positions: Positions, mask: Mask, cache: SelfAttentionCache | None) -> Lengths:
    """Return the length (B,) of the text in each row: its largest position plus 1, without padding.

    Args:
        positions: (B, T), of the new tokens.
        mask: its lengths and segments mark the padding.
        cache: the cache before them, which can know the length of a text that is read in parts; None: no cache.
    """
    start = None if cache is None else cache.row_lengths
    real = real_tokens(mask, positions.shape, start)
    if isinstance(cache, PagedKVCache):
        if cache.text_length is not None:
            return of_layer(cache.text_length, cache.layer)
        real = real & (jnp.arange(positions.shape[1])[None, :] < cache.chunk_lengths(positions.shape[1])[:, None])
    return jnp.where(real, positions, 0).max(1) + 1


def _position_bias(
    scheme: PositionScheme, positions: Array, key_positions: Array, table: Array | None, queries: Array, keys: Array
) -> Array:
    # From indices to positions: they differ with packing, padding and a cache. (B, t), (B, s) -> (B, N or 1, t, s)
    return scheme.bias(positions[:, queries], key_positions[:, keys], table)
