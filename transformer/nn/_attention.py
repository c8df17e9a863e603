"""Attention: `dot_product_attention` as a pure function, and `MultiHeadAttention`, which owns the projections."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer.config._options import QKNorm
from transformer.config._parts import QueryTemperature
from transformer.nn._axes import (
    Array,
    Attended,
    Context,
    Coordinates,
    DType,
    Float,
    Hidden,
    Key,
    Leaf,
    PRNGKey,
    Query,
    Value,
    Weights,
)
from transformer.nn._caches import ContextCache, KVCache, SelfAttentionCache, count_tokens, nan_without_room
from transformer.nn._masks import Mask
from transformer.nn._paged import text_lengths
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import constrain, explicit_spec
from transformer.nn._positions import NoPosition, PositionScheme, heated, largest_coordinate, rotated
from transformer.nn.kernels import ALL_KERNELS, PAGED_KERNELS, choose
from transformer.nn.kernels._arguments import bias_function, kernel_arguments, score_scale, sum_of_biases
from transformer.nn.kernels._contract import AttentionShapes, AttentionSpec, BiasFunction
from transformer.nn.layers._layers import (
    Factors,
    Initializer,
    Linear,
    defers,
    is_deterministic,
    projection,
)
from transformer.nn.layers._norms import NORMS, unscaled_rms_norm
from transformer.nn.quantization._schemes import Quantization

KEY_VALUE = ("key", "value")
"""projections of the source of keys and values"""

Attend: TypeAlias = Callable[[Query, AttentionSpec, str], tuple[Attended, Weights | None]]
"""(query (B, T, N, H), options, name of a kernel) -> the attended values, and the weights if they are asked for"""


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
    """Compute `dot_product_attention`, and the weights, by `spec`, whose mask and bias may be arrays."""
    lead = query.shape[:-3]
    query, key, value, spec = kernel_arguments(query, key, value, spec)
    # All kernels compute the same formula; the reference kernel in `kernels/_reference.py` writes it out.
    kernel = ALL_KERNELS[choose(implementation, spec)]
    length = "length" if kernel.split_keys else None  # most kernels need the full length of a row on each device
    key, value = (constrain(array, "batch", length, "kv_heads", "head_dim") for array in (key, value))
    sharding = explicit_spec(query)
    run = kernel.run if sharding is None else kernel.over_explicit_axes(spec, sharding)
    out, weights = run(query, key, value, spec)
    if not kernel.residuals:  # a kernel with residuals stores its output among them: one copy is enough
        out = checkpoint_name(out, "attention_output")
    # Restore the caller's batch axes.
    if len(lead) != 1:
        out, weights = (a if a is None else a.reshape(*lead, *a.shape[1:]) for a in (out, weights))
    return out, weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeysValues:
    """Keys and values of a layer, as arrays or in a cache, also for layers without own ones (Brandon et al. 2024)."""

    key: Leaf | None = None
    """(B, S, K, H), rotated; None: those in the cache"""
    value: Leaf | None = None
    """(B, S, K, Hv); None: those in the cache"""
    positions: Leaf | None = None
    """(B, S), positions of the keys; None: keys of a context, which have none"""
    cache: Leaf | None = None
    """the `KVCache` or `PagedKVCache` of the layer, with the new tokens; None: no cache"""
    start: Leaf | None = None
    """(B,), number of tokens in the cache before the new ones"""

    def attend(self, query: Query, spec: AttentionSpec, implementation: str) -> tuple[Attended, Weights | None]:
        """Compute attention of rotated queries (B, T, N, H), the new tokens; see `attend`."""
        if self.cache is None:
            return attend(query, self.key, self.value, spec, implementation)
        if self.key is None and not isinstance(self.cache, KVCache):
            return self._attend_to_pages(query, spec, implementation)
        spec = self._without_empty_slots(spec)
        if self.key is not None:
            return attend(query, self.key, self.value, spec, implementation)
        query, key, value, unpacked = self.cache.packed(query)
        out, weights = attend(query, key, value, spec, implementation)
        return unpacked(out), weights

    def _without_empty_slots(self, spec: AttentionSpec) -> AttentionSpec:
        # Attend to all S slots of the cache. Query index 0 is key index `start`, and the mask hides empty slots: they
        # contain zeros, whose score of 0 would still get weight.
        mask = spec.mask.shifted(self.start) & Mask.lengths(self.cache.row_lengths)
        return dataclasses.replace(spec, mask=mask)

    def _attend_to_pages(
        self, query: Query, spec: AttentionSpec, implementation: str
    ) -> tuple[Attended, Weights | None]:
        """Attend from the last T tokens of each row, whose result is undefined for padding, to the pages of the row."""
        cache = self.cache
        in_pages = dataclasses.replace(
            spec, pages=cache, start=self.start, shapes=AttentionShapes.of_pages(query, cache)
        )
        name = choose(implementation, in_pages)
        if name in PAGED_KERNELS:
            return PAGED_KERNELS[name].run(query, None, None, in_pages)
        return attend(query, *cache.whole(), self._without_empty_slots(spec), implementation)


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


class MultiHeadAttention(AttentionModule):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): self-attention, or cross-attention to a context.

    Each projection computes all heads in one matrix multiplication. Parameters: `query` (D, N, H), `key` (Dc, K, H),
    `value` (Dc, K, Hv) and `out` (N, Hv, out_features), each with a `kernel` and, with `use_bias`, a `bias`.
    `num_heads` is N. With `output_gate`, also `output_gate/kernel` (D, N, Hv).

    `norm_epsilon` applies to `qk_norm`. The other fields are those of `AttentionModule`.
    """

    parameter_axes = declare(
        dict.fromkeys(("query/kernel", "key/kernel", "value/kernel"), "embed -> heads _")
        | dict.fromkeys(("query/bias", "key/bias", "value/bias"), "heads _")
        | {"out/kernel": "heads _ -> embed", "out/bias": "embed"}
        | {"output_gate/kernel": "embed -> heads _", "sinks": "heads"}
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
    qk_norm: QKNorm | None = None
    """normalize queries and keys; None: no norm"""
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
        # Q = x W_Q for all heads: (B, T, D) x (D, N, H) -> (B, T, N, H). In self-attention keys and values come from x
        # too, K = x W_K (B, T, K, H) and V = x W_V (B, T, K, Hv), and the products are computed together.
        heads = self._project_heads(x, self._projected(context, cache, stored), head_dim)
        query = constrain(heads["query"], "batch", "length", "heads", "head_dim")
        if self.qk_norm is not None:
            query = self._normalize("query_norm", query)

        if context is None and not isinstance(cache, ContextCache):
            if positions is None:
                # With a cache, token t is at position length + t: a decoding step sees only the new token.
                positions = jnp.arange(x.shape[1])[None, :]
                positions = positions if cache is None else positions + cache.row_lengths[:, None]
            coordinates = jnp.broadcast_to(positions, (*x.shape[:2], *positions.shape[2:]))
            positions = largest_coordinate(coordinates)
            query = query if self.temperature is None else heated(self.temperature, query, positions)
            if stored is None:
                key, value = self._keys_and_values(heads)
                fits = None if cache is None else cache.fits(x.shape[1])
                query, attended_to = self._with_cache(query, key, value, coordinates, mask, cache)
                cache = attended_to.cache
            else:
                query, attended_to = rotated(self.position, query, coordinates, None), stored
                cache = count_tokens(x, cache)
            key_positions = attended_to.positions
            sizes = (x.shape[0], self.num_heads, x.shape[1], key_positions.shape[1])
            own = self.position.bias_of_scores(self.num_heads, positions, key_positions, position_table)
            bias = sum_of_biases(bias_function(bias, sizes), own)
        elif context is None:
            # Cross-attention to the context of an earlier call: its keys and values do not change between steps.
            attended_to = KeysValues(*cache.whole())
        else:
            # Cross-attention: queries come from x, keys and values from the context (section 3.2.3).
            # No positions: distances between the two sequences have no meaning, so nothing is rotated or biased.
            key, value = self._keys_and_values(self._project_heads(context, KEY_VALUE, head_dim))
            attended_to, cache = KeysValues(key, value), None if cache is None else ContextCache.of(key, value)

        # weight_s = exp(S_s) / (exp(sink) + sum_j exp(S_j)): with a sink the weights sum to less than 1, so a head can
        # attend to nothing. All sinks start at logit 0.
        sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,), self.param_dtype) if self.sinks else None
        given = {"scale": score_scale(self.scale, head_dim), "mask": mask, "bias": bias, "sinks": sinks}
        out = self.attended(attended_to.attend, query, **given, deterministic=deterministic, sow_weights=sow_weights)
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
        query = rotated(self.position, query, coordinates, lengths)
        if cache is None:
            key = rotated(self.position, key, coordinates, lengths)
            return query, KeysValues(key, value, positions)
        if not self.position.by_length:
            cache = cache.append(rotated(self.position, key, coordinates, lengths), value, positions)
            return query, KeysValues(None, None, cache.key_positions, cache, start)
        cache = cache.append(key, value, positions)
        key, value = cache.whole()
        key = rotated(self.position, key, cache.key_positions, lengths)
        return query, KeysValues(key, value, cache.key_positions, cache, start)

    def _head_dim(self, x: Hidden) -> int:
        if self.head_dim is None and x.shape[-1] % self.num_heads:
            raise ValueError(
                f"the width of x ({x.shape[-1]}) must be a multiple of num_heads ({self.num_heads}) when head_dim "
                f"is not given. Pass head_dim, or change one of the two."
            )
        return x.shape[-1] // self.num_heads if self.head_dim is None else self.head_dim

    @nn.nowrap
    def _projected(self, context: Array | None, cache: Any, stored: KeysValues | None) -> tuple[str, ...]:
        own = context is None and stored is None and not isinstance(cache, ContextCache)
        return ("query", *KEY_VALUE) if own else ("query",)

    def _project_heads(self, x: Hidden, names: Sequence[str], head_dim: int) -> dict[str, Float[Array, "B T ..."]]:
        """Project x (B, T, D) to the heads of queries (B, T, N, H), keys (B, T, K, H) and values (B, T, K, Hv)."""
        # With K < N (grouped-query attention) these kernels and the cache are smaller by N / K. K = 1: multi-query.
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        value_dim = head_dim if self.value_dim is None else self.value_dim
        sizes = {"query": (self.num_heads, head_dim), "key": (kv_heads, head_dim), "value": (kv_heads, value_dim)}
        chosen = [name for name in names if not (name == "value" and self.keys_as_values)]
        if len(chosen) > 1 and defers(self, x):
            factors = [self._projection(name, sizes[name])(x, defer=True) for name in chosen]
            return dict(zip(chosen, Factors.products(factors), strict=True))
        return {name: self._project(name, x, sizes[name]) for name in chosen}

    def _keys_and_values(self, heads: Mapping[str, Array]) -> tuple[Key, Value]:
        """Return keys and values of projected heads, normalized. Keys are not rotated yet."""
        key, value = heads["key"], heads["key" if self.keys_as_values else "value"]
        value = unscaled_rms_norm(value, self.norm_epsilon) if self.value_norm else value
        return (self._normalize("key_norm", key) if self.qk_norm is not None else key), value

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
        self.position.check_attention(context is not None)

    def _project(self, name: str, x: Array, features: tuple[int, ...], contract: int = 1) -> Array:
        return self._projection(name, features, contract)(x)

    def _projection(self, name: str, features: tuple[int, ...], contract: int = 1) -> Linear:
        # contract is 1 for (..., D) x (D, N, H), and 2 for (..., N, Hv) x (N, Hv, Do).
        use_bias = self.use_bias if self.biases is None else name in self.biases
        return projection(self, name, features, contract, use_bias and name != "output_gate")

    def _normalize(self, name: str, heads: Array) -> Array:
        # RMSNorm over a head gives it the length sqrt(H), so |q . k| / sqrt(H) <= sqrt(H) up to the learned scale:
        # scores stay small in training.
        if self.qk_norm.scale:
            norm = NORMS[self.qk_norm.kind](self.norm_epsilon, self.dtype, self.param_dtype, name=name)
        else:
            norm = functools.partial(unscaled_rms_norm, epsilon=self.norm_epsilon)
        if self.qk_norm.scope == "head":
            return norm(heads)  # (B, T, N, H), over H
        return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)  # over N H together
