"""The one legend of axis letters, and the array types made of them.

B batch, T query positions, S key positions, D d_model, N query heads, K key/value heads, H head size, Hv value head
size, F feed-forward width, E experts, L layers, V vocabulary, C classes or channels, P patches, M mel bins, Z
hypotheses of a beam, Dc width of the context, Do width of an output, R rows and W width of a position table. A small
letter is a part of the axis of its capital, or 1 in its place. Arrays are laid out (B, T, D) and (B, T, N, H), as in
`jax.nn.dot_product_attention`. Inside numerics an array of rank 4 and above may carry its axes as a suffix:
`scores_BNTS`.
"""

from typing import Any, TypeAlias

import jax
from jaxtyping import Array, Bool, Float, Int

Tokens: TypeAlias = Int[Array, "B T"]
"""token ids"""
Positions: TypeAlias = Int[Array, "B T"]
"""position of each element, fed to the position scheme"""
Hidden: TypeAlias = Float[Array, "B T D"]
"""residual stream"""
Context: TypeAlias = Float[Array, "B S Dc"]
"""what cross-attention reads: an encoder's output, of any width"""
Query: TypeAlias = Float[Array, "B T N H"]
Key: TypeAlias = Float[Array, "B S K H"]
Value: TypeAlias = Float[Array, "B S K Hv"]
Attended: TypeAlias = Float[Array, "B T N Hv"]
Weights: TypeAlias = Float[Array, "B N T S"]
"""attention weights, rows over S"""
Logits: TypeAlias = Float[Array, "B T V"]
Lengths: TypeAlias = Int[Array, " B"]
"""valid elements of each row"""
PRNGKey: TypeAlias = jax.Array
"""a typed key (`jax.random.key`) or the older raw uint32 pair"""
DType: TypeAlias = Any
"""anything `jnp.dtype` takes"""

Leaf: TypeAlias = Any
"""an array field of a pytree dataclass: JAX also puts placeholders there, so its shape is told in words, not checked"""

__all__ = [
    "Array",
    "Attended",
    "Bool",
    "Context",
    "DType",
    "Float",
    "Hidden",
    "Int",
    "Key",
    "Leaf",
    "Lengths",
    "Logits",
    "PRNGKey",
    "Positions",
    "Query",
    "Tokens",
    "Value",
    "Weights",
]
