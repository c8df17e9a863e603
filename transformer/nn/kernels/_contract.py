"""What an attention kernel is asked for, in one object, and which kernels serve which of its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, DType, Float, Key, Leaf, PRNGKey, Query, Value
from transformer.nn._masks import Mask
from transformer.nn._partitioning import num_shards

BiasFunction: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""(query indices (t,), key indices (s,)) -> what is added to that block of scores, broadcast to (B, N, t, s)"""


def _static(default: Any) -> Any:
    return field(default=default, metadata={"static": True})


@dataclass(frozen=True, kw_only=True)
class AttentionShapes:
    """The sizes of one call that decide which kernels can serve it: `num_queries` T and `num_keys` S."""

    num_queries: int
    num_keys: int
    head_dim: int = 64
    """H, size of a head of queries and keys"""
    value_dim: int = 64
    """Hv, size of a head of values"""
    dtype: DType = jnp.float32
    """of queries, keys and values"""
    length_shards: int = 1
    """into how many parts the mesh in force splits the length"""

    @staticmethod
    def of(query: Query, key: Key, value: Value) -> AttentionShapes:
        """Those of query (B, T, N, H), key (B, S, K, H) and value (B, S, K, Hv) under the mesh in force."""
        return AttentionShapes(
            num_queries=query.shape[1],
            num_keys=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            dtype=jnp.result_type(query, key, value),
            length_shards=num_shards("length"),
        )


NO_WEIGHT = -1e30
"""logit of a key that takes no weight. Finite: the difference of two is a number, and a row that sees no key divides
by exp(0) = 1 and gives zeros"""

_UNKNOWN = AttentionShapes(num_queries=1, num_keys=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Which attention to compute: softmax(capped(scale Q K^T) + bias + mask) V, with all of its options.

    A new option is a field here, its use in the kernels that serve it, and its line in `OPTIONS`.
    """

    mask: Leaf = Mask()
    """a `Mask`"""
    bias: Leaf | None = None
    """a `BiasFunction`, as a pytree (`jax.tree_util.Partial`)"""
    sinks: Leaf | None = None
    """(N,), one logit per head that takes part in the softmax and has no value"""
    dropout_key: Leaf | None = None
    """decides which weights are dropped"""
    scale: float = _static(1.0)
    """factor on the scores"""
    softcap: float | None = _static(None)
    """scores become softcap tanh(scores / softcap), before bias and mask"""
    dropout_rate: float = _static(0.0)
    """share of the weights set to zero"""
    broadcast_dropout: bool = _static(False)
    """drop the same weights (T, S) in all rows and heads"""
    return_weights: bool = _static(False)
    """also return the softmax weights, before dropout"""
    shapes: AttentionShapes = field(default=_UNKNOWN, metadata={"static": True})

    def capped(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        """Products of queries and keys, of any shape -> scores before bias and mask, of the same shape (Vaswani et al.
        2017, section 3.2.1; softcap: Gemma 2, arXiv 2408.00118, section 2).
        """
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def sink_logits(self, num_heads: int) -> Float[Array, " N"]:
        """The sinks in float32 (Xiao et al. 2023, arXiv 2309.17453); without sinks, logits that take no weight.

        For kernels whose running softmax starts at a sink: one key seen before all others, which has no value.
        """
        return jnp.full(num_heads, NO_WEIGHT) if self.sinks is None else self.sinks.astype(jnp.float32)

    def drop(self, weights: Float[Array, "... t s"], key: PRNGKey | None) -> Float[Array, "... t s"]:
        """Weights with some set to zero and the rest scaled up, of the same shape (Srivastava et al. 2014)."""
        if self.dropout_rate == 0.0:
            return weights
        lead = (1,) * (weights.ndim - 2) if self.broadcast_dropout else weights.shape[:-2]
        keep = jax.random.bernoulli(key, 1.0 - self.dropout_rate, (*lead, *weights.shape[-2:]))
        return jnp.where(keep, weights / (1.0 - self.dropout_rate), 0.0)

    @property
    def options(self) -> tuple[str, ...]:
        """The names in `OPTIONS` of what this call asks for."""
        return tuple(name for name, option in OPTIONS.items() if option.is_used(self))


@dataclass(frozen=True)
class Option:
    """An option of attention that not every kernel serves."""

    is_used: Callable[[AttentionSpec], bool]
    """whether a call asks for it"""
    words: str
    """what a kernel does that serves it, for "the x kernel can't ..." """
    kernels: frozenset[str]
    """names of the kernels that serve it"""


def _option(words: str, kernels: str, is_used: Callable[[AttentionSpec], bool]) -> Option:
    return Option(is_used, words, frozenset(kernels.split()))


_ANY = "reference query_chunked blockwise all_gather_kv"

OPTIONS: dict[str, Option] = {
    "weights": _option("return attention weights", "reference", lambda spec: spec.return_weights),
    "bias": _option("add a bias", _ANY, lambda spec: spec.bias is not None),
    "dropout": _option("drop attention weights", _ANY, lambda spec: spec.dropout_rate > 0.0),
    "mask array": _option("apply a mask array", _ANY, lambda spec: spec.mask.facts["has_dense_mask"]),
    "segments": _option(
        "keep packed segments apart", f"{_ANY} ring splash", lambda spec: spec.mask.facts["has_segments"]
    ),
    "two-sided window": _option(
        "look through a window to both sides",
        f"{_ANY} ring splash",
        lambda spec: spec.mask.facts["has_two_sided_window"],
    ),
    "offset": _option("begin at an offset (a cache)", f"{_ANY} ring", lambda spec: spec.mask.facts["has_offset"]),
    "softcap": _option("cap scores", f"{_ANY} ring splash", lambda spec: spec.softcap is not None),
    "sinks": _option("let sinks take weight", f"{_ANY} ring splash", lambda spec: spec.sinks is not None),
}
"""what a call may ask for, and the kernels that serve it; causal masks, windows to the past and lengths of rows are
served by every kernel"""


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention: `run(query, key, value, spec)` returns (attended, weights), weights None unless
    asked for.
    """

    name: str
    """its key in `ALL_KERNELS`"""
    run: Callable[[Query, Key, Value, AttentionSpec], tuple[jax.Array, Any]]
    reasons: Mapping[str, str] = field(default_factory=dict)
    """option -> why this kernel does not serve it"""
    limits: Callable[[AttentionSpec], str | None] = lambda spec: None
    """what of the sizes, types and devices of a call the kernel can't serve, and why; None: it can"""
    split_keys: bool = False
    """whether keys and values may stay split along their length; else each device gets the whole length"""

    def unsupported(self, spec: AttentionSpec) -> str | None:
        """What of a call this kernel can't do and why ("add a bias: ..."), to follow "can't"; None: it can serve it."""
        if (limit := self.limits(spec)) is not None:
            return limit
        for name in spec.options:
            if self.name not in OPTIONS[name].kernels:
                reason = self.reasons.get(name)
                return OPTIONS[name].words + (f": {reason}" if reason else "")
        return None


def bias_block(bias: BiasFunction, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """The bias between queries (t,) and keys (s,) with all four axes, (B or 1, N or 1, t or 1, s or 1)."""
    block = bias(queries, keys)
    return block.reshape((1,) * (4 - block.ndim) + block.shape)
