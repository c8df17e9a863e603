"""The interface of attention kernels: the specification of a call, and which kernels support which option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer.nn._axes import Array, DType, Float, Key, Leaf, PRNGKey, Query, Value, static
from transformer.nn._masks import Mask
from transformer.nn._partitioning import in_auto_axes, num_shards

BiasFunction: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""(query indices (t,), key indices (s,)) -> the term added to that block of scores; broadcasts to (B, N, t, s)"""


@dataclass(frozen=True, kw_only=True)
class AttentionShapes:
    """Sizes of a call that determine which kernels support it: `num_queries` T and `num_keys` S."""

    num_queries: int
    num_keys: int
    head_dim: int = 64
    """H, head dimension of queries and keys"""
    value_dim: int = 64
    """Hv, head dimension of values"""
    dtype: DType = jnp.float32
    """data type of queries, keys and values"""
    length_shards: int = 1
    """number of shards into which the active mesh splits the sequence length"""

    @property
    def is_symbolic(self) -> bool:
        """Whether a length is unknown during tracing (jax.export), so that it can't be divided into blocks."""
        return not (isinstance(self.num_queries, int) and isinstance(self.num_keys, int))

    @staticmethod
    def of(query: Query, key: Key, value: Value) -> AttentionShapes:
        """Return the sizes of query (B, T, N, H), key (B, S, K, H) and value (B, S, K, Hv) under the active mesh."""
        return AttentionShapes(
            num_queries=query.shape[1],
            num_keys=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            dtype=jnp.result_type(query, key, value),
            length_shards=num_shards("length"),
        )

    @staticmethod
    def of_pages(query: Query, cache: Any) -> AttentionShapes:
        """Return the sizes of query (B, T, N, H) and a `PagedKVCache` of S = M Q slots per row, empty ones included."""
        return AttentionShapes(
            num_queries=query.shape[1],
            num_keys=cache.page_table.shape[-1] * cache.page_size,
            head_dim=query.shape[3],
            value_dim=cache.value_dim,
            dtype=query.dtype,
        )


NO_WEIGHT = -1e30
"""Logit of a key that gets no weight. It is finite, unlike -inf: the difference of two such logits is 0 and not NaN,
and a query without visible keys divides its zeros by exp(0) = 1 and not by 0."""

NO_PAGES = "read keys and values outside a paged KV cache"
"""why kernels for pages do not support other calls; the text follows "can't" """

_UNKNOWN = AttentionShapes(num_queries=1, num_keys=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention to compute: softmax(capped(scale Q K^T) + bias + mask) V, with all options.

    To add an option, add a field here, use it in the kernels that support it, and add an entry to `OPTIONS`.
    """

    mask: Leaf = Mask()
    """which query may attend to which key, a `Mask`"""
    bias: Leaf | None = None
    """a `BiasFunction`, as a pytree (`jax.tree_util.Partial`)"""
    sinks: Leaf | None = None
    """(N,), one extra logit per head that takes part in the softmax but has no value vector"""
    dropout_key: Leaf | None = None
    """random key of the attention dropout"""
    pages: Leaf | None = None
    """a `PagedKVCache` with the keys and values of the queries' tokens too, for kernels that read its pages; None: keys
    and values are arrays. The mask is then in addition to the lengths of the rows"""
    start: Leaf | None = None
    """(B,), with `pages`: number of tokens of each row before the queries"""
    scale: float = static(1.0)
    """factor applied to the scores, usually 1 / sqrt(H)"""
    softcap: float | None = static(None)
    """replace scores by softcap tanh(scores / softcap), before bias and mask"""
    dropout_rate: float = static(0.0)
    """probability that an attention weight is set to zero"""
    broadcast_dropout: bool = static(False)
    """use the same dropout pattern (T, S) for all batch rows and heads"""
    return_weights: bool = static(False)
    """also return the softmax weights, before dropout"""
    shapes: AttentionShapes = field(default=_UNKNOWN, metadata={"static": True})

    def capped(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the scores before bias and mask for dot products of queries and keys, with the same shape.

        The scale is that of Vaswani et al. 2017, section 3.2.1; the softcap that of Gemma 2 (arXiv 2408.00118).
        """
        # Dot products of H terms with unit variance have variance H. The scale 1 / sqrt(H) brings it back to 1, so that
        # the softmax does not saturate at initialization.
        scores = products * self.scale
        # tanh limits scores smoothly to (-softcap, softcap) and is close to the identity near 0.
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def sink_logits(self, num_heads: int) -> Float[Array, " N"]:
        """Return the sink logits in float32 (Xiao et al. 2023, arXiv 2309.17453), or `NO_WEIGHT` without sinks.

        For kernels whose running softmax starts from a sink: a key processed before all others, without a value.
        """
        return jnp.full(num_heads, NO_WEIGHT) if self.sinks is None else self.sinks.astype(jnp.float32)

    def drop(self, weights: Float[Array, "... t s"], key: PRNGKey | None) -> Float[Array, "... t s"]:
        """Apply dropout to attention weights (Srivastava et al. 2014); the shape stays the same."""
        if self.dropout_rate == 0.0:
            return weights
        # (1, ..., 1, t, s) is one pattern for all rows and heads
        lead = (1,) * (weights.ndim - 2) if self.broadcast_dropout else weights.shape[:-2]
        # Kept weights are divided by the probability of keeping them, so that the expected output is unchanged and
        # inference needs no correction ("inverted" dropout).
        keep = jax.random.bernoulli(key, 1.0 - self.dropout_rate, (*lead, *weights.shape[-2:]))
        return jnp.where(keep, weights / (1.0 - self.dropout_rate), 0.0)

    @property
    def options(self) -> tuple[str, ...]:
        """Names in `OPTIONS` of the options that this call uses."""
        return tuple(name for name, option in OPTIONS.items() if option.is_used(self))


@dataclass(frozen=True)
class Option:
    """An attention option that not every kernel supports."""

    is_used: Callable[[AttentionSpec], bool]
    """whether a call uses the option"""
    words: str
    """what the kernel would have to do, as a verb phrase for "the x attention kernel can't ..." """
    kernels: frozenset[str]
    """names of the kernels that support it"""


def _option(words: str, kernels: str, is_used: Callable[[AttentionSpec], bool]) -> Option:
    return Option(is_used, words, frozenset(kernels.split()))


_ANY = "reference query_chunked blockwise all_gather_kv"
_ALSO_PAGES = f"{_ANY} page_blocks"

OPTIONS: dict[str, Option] = {
    "pages": _option("read a paged KV cache", "ragged_paged page_blocks", lambda spec: spec.pages is not None),
    "weights": _option("return attention weights", "reference", lambda spec: spec.return_weights),
    "bias": _option("add a bias", _ALSO_PAGES, lambda spec: spec.bias is not None),
    "dropout": _option("drop attention weights", _ANY, lambda spec: spec.dropout_rate > 0.0),
    "mask array": _option("apply a mask array", _ALSO_PAGES, lambda spec: spec.mask.facts["has_dense_mask"]),
    "segments": _option(
        "keep packed segments apart", f"{_ALSO_PAGES} ring splash flash", lambda spec: spec.mask.facts["has_segments"]
    ),
    "two-sided window": _option(
        "apply a two-sided window",
        f"{_ALSO_PAGES} ring splash flash",
        lambda spec: spec.mask.facts["has_two_sided_window"],
    ),
    "chunks": _option("attend in chunks", f"{_ALSO_PAGES} splash flash", lambda spec: spec.mask.facts["has_chunks"]),
    "offset": _option(
        "start at an offset (a cache)",
        f"{_ALSO_PAGES} ring ragged_paged flash flash_decode",
        lambda spec: spec.mask.facts["has_offset"],
    ),
    "softcap": _option(
        "apply a softcap",
        f"{_ALSO_PAGES} ring splash ragged_paged flash flash_decode",
        lambda spec: spec.softcap is not None,
    ),
    "sinks": _option(
        "use attention sinks", f"{_ALSO_PAGES} ring splash flash flash_decode", lambda spec: spec.sinks is not None
    ),
}
"""Options of a call and the kernels that support them. All support causal masks, causal windows and lengths."""


@dataclass(frozen=True)
class Kernel:
    """An implementation of attention.

    `run(query, key, value, spec)` returns (attended, weights); weights are None unless `spec.return_weights` is set.
    Kernels that read `spec.pages` get None for key and value.
    """

    name: str
    """key in `ALL_KERNELS`"""
    run: Callable[[Query, Key | None, Value | None, AttentionSpec], tuple[jax.Array, Any]]
    reasons: Mapping[str, str] = field(default_factory=dict)
    """option -> why this kernel does not support it"""
    limits: Callable[[AttentionSpec], str | None] = lambda spec: None
    """returns why the kernel does not support the sizes, types or devices of a call; None if it supports them"""
    compiler_refusal: Callable[[AttentionSpec], str | None] = lambda spec: None
    """for a kernel that depends on versions of other software: returns why it does not compile for the devices"""
    residuals: tuple[str, ...] = ()
    """checkpoint names of the values that the forward pass stores for the kernel's own backward pass"""
    split_keys: bool = False
    """whether keys and values may stay sharded along the length; otherwise each device gets the whole length"""

    def over_explicit_axes(self, spec: AttentionSpec, sharding: PartitionSpec) -> Callable[..., Any]:
        """Return `run` for a mesh with Explicit axes, for a query of this sharding; the output is sharded like it.

        Under such a mesh, a bias function that reads arrays must be a pytree with these arrays as leaves.
        """

        def attended(query, key, value, spec):
            out, weights = self.run(query, key, value, spec)
            return (out, weights) if spec.return_weights else (out,)

        rows, length, heads, _ = sharding
        # The output (B, T, N, Hv) and the weights (B, N, T, S)
        specs = PartitionSpec(rows, length, heads, None), PartitionSpec(rows, heads, length, None)
        run = in_auto_axes(attended, specs if spec.return_weights else specs[:1])
        return lambda *given: (*run(*given), None)[:2]

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """Return what this kernel can't do for a call, and why ("add a bias: ..."); None if it supports the call.

        The text follows "the x attention kernel can't".
        """
        if (limit := self.limits(spec)) is not None:
            return limit
        for name in spec.options:
            if self.name not in OPTIONS[name].kernels:
                reason = self.reasons.get(name)
                return OPTIONS[name].words + (f": {reason}" if reason else "")
        return None


def bias_block(bias: BiasFunction, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Return the bias between queries (t,) and keys (s,) with four axes, (B or 1, N or 1, t or 1, s or 1)."""
    # (t, s) -> (1, 1, t, s), (N, t, s) -> (1, N, t, s)
    block = bias(queries, keys)
    return block.reshape((1,) * (4 - block.ndim) + block.shape)


def attention_example(
    attend: Callable[..., Any], shape: tuple[int, int, int, int], dtype: DType
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Return forward and backward pass of causal self-attention, for arrays (B, T, N, H), as an example."""

    def loss(query, key, value):
        out, _ = attend(query, key, value, AttentionSpec(mask=Mask.causal()))
        # jax.grad needs a scalar. The gradient of the sum uses the kernels of the backward pass too.
        return out.astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2)), [jax.ShapeDtypeStruct(shape, dtype)] * 3
