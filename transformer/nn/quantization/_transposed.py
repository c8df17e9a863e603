"""Products with 8-bit and 16-bit kernels on a CPU, and forms of these kernels for decoding.

A decoding step multiplies a few rows of activations by each kernel, so its time is that of reading the kernels. A CPU
multiplies 8-bit integers as fast as it reads them, if the inputs of an output are next to each other (`Transposed`).
Newer releases of XLA multiply bfloat16 directly (`bfloat16_product` in `_linear.py`). Otherwise XLA converts 16-bit
kernels to float32 before each product, which takes longer than the product; `Widened` is converted once.
docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import Array, DType, Float, Leaf, static
from transformer.nn.quantization._linear import linear
from transformer.nn.quantization._schemes import Scheme

INTEGER_ROWS = 32
"""Maximum number of rows that are rounded to integers for a product of integers. On two cores of an AMD EPYC, with 768
to 3,072 inputs and outputs, this product takes at most as long as that of float32 weights for 4 to 16 rows, about as
long for 32, and longer for 64."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """An 8-bit kernel (*in, *out) with one row per output; Di and Do are the sizes of *in* and *out*."""

    values: Leaf  # (Do, Di), int8
    scale: Leaf  # (Do,), float32, factors of the outputs
    shape: tuple[int, ...] = static()  # shape of the kernel, (*in, *out)

    def array(self, dtype: DType = jnp.float32) -> Array:
        """Return the kernel in its original shape."""
        return (self.values.astype(jnp.float32) * self.scale[:, None]).T.reshape(self.shape).astype(dtype)

    def product(self, x: Array, contract: int = 1, quantization: Scheme | None = None) -> Array:
        """Multiply x by the kernel, as `Encoded`; the factors are not quantized."""
        lead = x.shape[: x.ndim - contract]
        y = row_product(x.reshape(math.prod(lead), -1), self.values, self.scale)
        return y.astype(x.dtype).reshape(*lead, *self.shape[contract:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Widened:
    """A 16-bit kernel in float32. Its products are computed in float32, and rounded to the dtype of the activations."""

    values: Leaf  # float32, with the numbers of the 16-bit kernel

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return self.values.shape

    def array(self, dtype: DType = jnp.float32) -> Array:
        """Return the kernel in a dtype."""
        return self.values.astype(dtype)

    def product(self, x: Array, contract: int = 1, quantization: Scheme | None = None) -> Array:
        """Multiply x by the kernel, as `Encoded`; the factors are not quantized."""
        return linear(x.astype(jnp.float32), self.values, contract=contract).astype(x.dtype)


def row_product(
    x: Float[Array, "R Di"], values: Array, scale: Float[Array, " Do"] | None = None
) -> Float[Array, "R Do"]:
    """Compute x (R, Di) @ (values (Do, Di) * scale (Do, 1))^T in float32; `values` are int8 or floats, no scale is 1.

    Up to `INTEGER_ROWS` rows are rounded to 15 bits if the values are integers (see `_integer_product`). Otherwise, the
    values are converted to float32; in a loop over tokens, XLA does this once, before the loop.
    """
    x = x.astype(jnp.float32)
    exact = 127**2 * values.shape[1] < 2**31  # a sum of products fits into int32
    if values.dtype == jnp.int8 and exact and x.shape[0] <= INTEGER_ROWS:
        y = _integer_product(x, values)
    else:
        y = x @ values.astype(jnp.float32).T
    return y if scale is None else y * scale[None, :]


@jax.custom_vjp
def _integer_product(x: Float[Array, "R Di"], values: Array) -> Float[Array, "R Do"]:
    """Compute x @ values^T with 8-bit integers: x ~ s (h + l / 254), with integers h, l from -127 to 127 per row."""
    # The two products h values^T and l values^T are one product with 2 R rows, exact in int32. The rounding error of x
    # is at most s / 508 = max |x| / 64,516. A CPU multiplies 8-bit integers faster than it converts them.
    scale = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127.0
    scale = jnp.where(scale == 0.0, 1.0, scale)  # a row of zeros
    # x / s is from -127 to 127, and h its nearest integer. The rest is from -1/2 to 1/2, so 254 times the rest fits
    # into another integer from -127 to 127.
    high = jnp.round(x / scale)
    low = jnp.round((x / scale - high) * 254.0)
    factors = jnp.concatenate([high, low]).astype(jnp.int8)
    # (2 R, Di), (Do, Di) -> (2 R, Do)
    sums = jax.lax.dot_general(factors, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    high, low = jnp.split(sums.astype(jnp.float32), 2)
    return (high + low / 254.0) * scale


def _backward(values, dy):
    # The derivative of the product before rounding. Integers have no derivative.
    return dy @ values.astype(jnp.float32), np.zeros(values.shape, jax.dtypes.float0)


_integer_product.defvjp(lambda x, values: (_integer_product(x, values), values), _backward)


def transposed(values: Array, scale: Array, num_inputs: int) -> Transposed:
    """Store an int8 kernel (*in, *out), of which *in* has `num_inputs` axes, with one row and one scale per output."""
    rows = values.reshape(math.prod(values.shape[:num_inputs]), -1).T
    return Transposed(rows, scale.reshape(-1), tuple(values.shape))
