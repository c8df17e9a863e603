"""Kernels with one row per output, for decoding on a CPU: 16-bit and 8-bit weights are read as they are.

A decoding step multiplies a few rows of activations by each kernel, so its time is that of reading the kernels. On CPU,
XLA converts a 16-bit or 8-bit kernel to a float32 array first, and this array is several times larger than the kernel.
A vector times a kernel with one row per output is compiled to one loop that converts each weight as it reads it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import Array, DType, Float, Leaf

INTEGER_ROWS = 32
"""Maximum number of rows that are rounded to integers for a product of integers (docs/benchmarks.md)"""
PIECE = 3072
"""Maximum number of inputs of one loop: from 4,096 inputs of float32 (16 KiB), XLA makes the float32 array again."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A kernel (*in, *out) stored with one row per output; I and O are the sizes of *in* and *out* in total."""

    values: Leaf
    """(O, I), int8 or a 16-bit float"""
    scale: Leaf | None
    """(O,), float32, factors of the outputs; None: no factors"""
    shape: tuple[int, ...] = field(metadata={"static": True})
    """shape of the kernel, (*in, *out)"""

    def array(self, dtype: DType = jnp.float32) -> Array:
        """Return the kernel in its original shape."""
        rows = self.values.astype(jnp.float32)
        if self.scale is not None:
            rows = rows * self.scale[:, None]
        return rows.T.reshape(self.shape).astype(dtype)

    def product(self, x: Float[Array, "..."], contract: int) -> Float[Array, "..."]:
        """Multiply x (..., *in) by the kernel (*in, *out), where *in* has `contract` axes: (..., *out)."""
        lead = x.shape[: x.ndim - contract]
        y = row_product(x.reshape(math.prod(lead), -1), self.values, self.scale)
        return y.astype(x.dtype).reshape(*lead, *self.shape[contract:])


def row_product(x: Float[Array, "R I"], values: Array, scale: Float[Array, " O"] | None = None) -> Float[Array, "R O"]:
    """Compute x @ (values * scale[:, None])^T in float32, reading `values` in their own dtype if R is small.

    Integers are multiplied by x rounded to 15 bits (see `_integer_product`), up to `INTEGER_ROWS` rows. One row is
    multiplied by 16-bit values as they are. Otherwise, the values are converted to float32 first; in a loop over
    tokens, XLA does this once, before the loop.

    Args:
        x: (R, I), of any floating dtype.
        values: (O, I), int8 or a 16-bit float.
        scale: (O,); None: 1.
    """
    x = x.astype(jnp.float32)
    if values.dtype == jnp.int8 and x.shape[0] <= INTEGER_ROWS:
        y = _integer_product(x, values)
    elif x.shape[0] == 1:
        y = _vector_product(x, values)
    else:
        y = x @ values.astype(jnp.float32).T
    return y if scale is None else y * scale[None, :]


def _vector_product(x: Float[Array, "1 I"], values: Array) -> Float[Array, "1 O"]:
    """Compute x @ values^T in pieces of at most `PIECE` inputs."""
    # In a loop over tokens, XLA would convert the values once before the loop, to an array of float32. With the barrier
    # the values depend on x, which differs in each step. The barriers after the products keep other operations out of
    # their loops.
    x, values = jax.lax.optimization_barrier((x, values))
    count = -(-x.shape[1] // PIECE)
    edges = [x.shape[1] * piece // count for piece in range(count + 1)]
    products = [
        jax.lax.optimization_barrier(x[:, start:end] @ values[:, start:end].astype(jnp.float32).T)
        for start, end in itertools.pairwise(edges)
    ]
    return sum(products[1:], products[0])


@jax.custom_vjp
def _integer_product(x: Float[Array, "R I"], values: Array) -> Float[Array, "R O"]:
    """Compute x @ values^T with 8-bit integers: x ~ s (h + l / 254), with integers h, l from -127 to 127 for each row.

    The two products h values^T and l values^T are one product with 2 R rows, exact in int32. The rounding error of x is
    at most s / 508 = max |x| / 64,516. A CPU multiplies 8-bit integers faster than it converts them.
    """
    scale = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127.0
    scale = jnp.where(scale == 0.0, 1.0, scale)  # a row of zeros
    high = jnp.round(x / scale)
    low = jnp.round((x / scale - high) * 254.0)
    factors = jnp.concatenate([high, low]).astype(jnp.int8)
    sums = jax.lax.dot_general(factors, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    high, low = jnp.split(sums.astype(jnp.float32), 2)
    return (high + low / 254.0) * scale


def _forward(x, values):
    return _integer_product(x, values), values


def _backward(values, dy):
    # The derivative of the product before rounding. Integers have no derivative.
    return dy @ values.astype(jnp.float32), np.zeros(values.shape, jax.dtypes.float0)


_integer_product.defvjp(_forward, _backward)


def transposed(values: Array, scale: Array | None, num_inputs: int) -> Transposed:
    """Store a kernel (*in, *out) with one row per output.

    Args:
        values: (*in, *out), int8 or a 16-bit float; *in* has `num_inputs` axes.
        scale: one factor per output, in any shape of their number; None: no factors.
        num_inputs: number of input axes.
    """
    rows = values.reshape(math.prod(values.shape[:num_inputs]), -1).T
    return Transposed(rows, None if scale is None else scale.reshape(-1), tuple(values.shape))
