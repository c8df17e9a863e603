"""The meaning of each axis letter in this package, and array types annotated with them.

B batch, T query positions, S key positions, D d_model, N query heads, K key/value heads, H head size, Hv value head
size, F feed-forward width, E experts, L layers, V vocabulary, C classes or channels, P patches or pages, Q tokens of a
page, M mel bins or features of a convolution, A samples of audio, I images, Z hypotheses of a beam, Dc width of the
context, Di width of an input, Do width of an output, R rows, W width of a position table. A lower-case letter is a part
(a block or a shard) of the axis with the same capital letter, or an axis of size 1 in its place. The axis order is
(B, T, D) and (B, T, N, H), as in `jax.nn.dot_product_attention`. In numeric code the name of an array of rank 4 or more
may end in its axes: `scores_BNTS`.
"""

import dataclasses
from typing import Any, TypeAlias

import jax
from jaxtyping import Array as Array
from jaxtyping import Bool as Bool
from jaxtyping import Float, Int
from jaxtyping import PyTree as PyTree

Tokens: TypeAlias = Int[Array, "B T"]
"""token ids"""
Positions: TypeAlias = Int[Array, "B T"]
"""position of each token, the input of the position scheme"""
Coordinates: TypeAlias = Int[Array, "B T ..."]
"""position of each token, or several coordinates of it, (B, T, A)"""
Hidden: TypeAlias = Float[Array, "B T D"]
"""residual stream"""
Context: TypeAlias = Float[Array, "B S Dc"]
"""input of cross-attention: the output of an encoder, of any width"""
# G = N / K query heads share a key/value head (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245).
Query: TypeAlias = Float[Array, "B T N H"]
Key: TypeAlias = Float[Array, "B S K H"]
Value: TypeAlias = Float[Array, "B S K Hv"]
Attended: TypeAlias = Float[Array, "B T N Hv"]
Weights: TypeAlias = Float[Array, "B N T S"]
"""attention weights; each row over S sums to 1"""
Logits: TypeAlias = Float[Array, "B T V"]
Lengths: TypeAlias = Int[Array, " B"]
"""number of valid elements in each row"""
PRNGKey: TypeAlias = jax.Array
"""a typed key (`jax.random.key`) or the older raw uint32 pair"""
DType: TypeAlias = Any
"""anything that `jnp.dtype` accepts"""

Leaf: TypeAlias = Any
"""an array field of a pytree dataclass. JAX also stores placeholders in such fields, so that a checked shape annotation
would fail; the docstring of the field gives the shape instead"""


def static(default: Any = dataclasses.MISSING) -> Any:
    """Return a field of a pytree that belongs to its structure: Python can branch on it, each value compiles anew."""
    return dataclasses.field(default=default, metadata={"static": True})
