"""Quantized matrix multiplications: both factors are rounded to 8 bits, multiplied, and the result is scaled.

Peak speeds of many accelerators are twice as high for 8 bits as for bfloat16. Parameters, activations between layers
and the optimizer keep their dtypes: only the factors of a multiplication are rounded, again in every step. The package
qwix, which is optional, rounds and multiplies; the derivatives are defined here.

The 8-bit parameters of `_int8.py` are something else: they are rounded once, to save memory in generation.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._execution import Execution
from transformer.nn._axes import Array, DType, Float

INSTALL = "pip install 'transformer-zoo[quantization]'"
"""command that installs qwix"""


@dataclass(frozen=True)
class Scheme:
    """Dtypes of the factors of the three products of a linear map, y = x W, dx = dy W^T and dW = x^T dy."""

    dtype: str
    """dtype of x and W"""
    gradient_dtype: str | None = None
    """dtype of dy, and then the dtype of x and W in the products with dy is also `dtype`; None: these two products are
    not quantized, their factors are the x and W before rounding"""


SCHEMES = {
    "int8": Scheme("int8"),
    "int8_full": Scheme("int8", "int8"),
    # The range of gradients is wider than that of activations, so they get 5 exponent bits and 2 bits of mantissa
    # instead of 4 and 3 (Micikevicius et al. 2022, arXiv 2209.05433, section 3).
    "fp8": Scheme("float8_e4m3fn"),
    "fp8_full": Scheme("float8_e4m3fn", "float8_e5m2"),
}
"""schemes by name, the values of `Execution.quantization` other than "none" """


@dataclass(frozen=True)
class Quantization:
    """Which products of a model are quantized, and how."""

    scheme: Scheme
    paths: tuple[str, ...] = ()
    """parts of the paths of the kernels, such as self_attention/out; (): all kernels of the layers"""

    @staticmethod
    def of(execution: Execution) -> Quantization | None:
        """Return the quantization that the execution options select; None: none."""
        if execution.quantization == "none":
            return None
        return Quantization(SCHEMES[execution.quantization], execution.quantization_paths)

    def at(self, *path: str) -> Scheme | None:
        """Return the scheme of the kernel with this path, such as ("decoder", ..., "up", "kernel"); None: none."""
        joined = "/".join(("", *path, ""))
        return self.scheme if not self.paths or any(f"/{part}/" in joined for part in self.paths) else None


def is_installed() -> bool:
    """Return whether qwix is installed."""
    return importlib.util.find_spec("qwix") is not None


def quantized(array: Float[Array, "..."], summed: Sequence[int], dtype: str | None) -> Any:
    """Round an array to 8 bits, with one scale for all entries along the axes that a product sums over (from 0).

    The scale maps the largest magnitude to the largest number of the dtype (absmax quantization). It is constant in the
    sums of the product, so that it can be applied afterwards. `dtype` None returns the array as it is. Raises
    ConfigError if qwix is not installed.
    """
    if dtype is None:
        return array
    kept = [axis for axis in range(array.ndim) if axis not in summed]
    # From float32, so that each number is rounded once: array / scale in bfloat16 would be rounded before the integer.
    return _qwix().quantize(array.astype(jnp.float32), jnp.dtype(dtype), channelwise_axes=kept)


def multiply(left: Any, right: Any, left_axes: Sequence[int], right_axes: Sequence[int], dtype: DType) -> Array:
    """Multiply two arrays, or two results of `quantized`, and sum over the given axes of both, numbered from 0.

    Returns the other axes of `left`, then those of `right`, in `dtype`. Integers are summed exactly, in int32,
    floating-point numbers of 8 bits in float32.
    """
    # sum_i (a s) (b t) = s t sum_i a b. int32 holds exact sums of up to 133,144 products of 127 x 127.
    dimensions = (tuple(left_axes), tuple(right_axes)), ((), ())
    if isinstance(left, jax.Array):
        return jax.lax.dot_general(left, right, dimensions, preferred_element_type=dtype)
    return _qwix().dot_general(left, right, dimensions).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def quantized_linear(x: Array, kernel: Array, contract: int, scheme: Scheme) -> Array:
    """Compute x (..., *in) @ kernel (*in, *out) -> (..., *out) with quantized factors, where *in* has `contract` axes.

    Each row of x and each output of the kernel has its own scale. The derivatives are those of the unquantized product,
    as if rounding were the identity (straight-through estimator, Bengio et al. 2013, arXiv 1308.3432), with factors
    quantized according to the scheme.
    """
    inputs, inner = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    rows, outputs = quantized(x, inputs, scheme.dtype), quantized(kernel, inner, scheme.dtype)
    return multiply(rows, outputs, inputs, inner, x.dtype)


def _backward(contract, scheme, saved, dy):
    # Each product sums over other axes than the forward product, so x and W get new scales here: along the rows for
    # dW = x^T dy, along the outputs for dx = dy W^T.
    x, kernel = saved
    rows = tuple(range(x.ndim - contract))
    dy_outputs, outputs = tuple(range(len(rows), dy.ndim)), tuple(range(contract, kernel.ndim))
    dtype = None if scheme.gradient_dtype is None else scheme.dtype

    def product(left, right, left_axes, right_axes, like):
        return multiply(left, right, left_axes, right_axes, like.dtype)

    gradients = quantized(dy, dy_outputs, scheme.gradient_dtype)
    dx = product(gradients, quantized(kernel, outputs, dtype), dy_outputs, outputs, x)
    gradients = quantized(dy, rows, scheme.gradient_dtype)
    return dx, product(quantized(x, rows, dtype), gradients, rows, rows, kernel)


quantized_linear.defvjp(lambda *given: (quantized_linear(*given), given[:2]), _backward)  # saves the arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def integer_linear(x: Array, values: Array, scale: Array, contract: int, scheme: Scheme) -> Array:
    """Compute x (..., *in) @ W (*in, *out) -> (..., *out) for a frozen kernel W = values scale, with x in integers.

    `values` are int8 and `scale` is (1, ..., *out), one number per output. The derivative by x is that of the product
    with x before rounding, as in `quantized_linear`; W has none.
    """
    inputs, inner = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    return multiply(quantized(x, inputs, scheme.dtype), _as_factor(values, scale), inputs, inner, x.dtype)


def _integer_forward(x, values, scale, contract, scheme):
    return integer_linear(x, values, scale, contract, scheme), (values, scale)


def _integer_backward(contract, scheme, saved, dy):
    # dx_i = sum_j dy_j W_ij = sum_j (dy_j s_j) q_ij: the scales vary along the sum, so they are applied to dy.
    values, scale = saved
    outputs = tuple(range(contract, values.ndim))
    dy_outputs = tuple(range(dy.ndim - len(outputs), dy.ndim))
    # (..., *out) x (1, ..., 1, *out)
    scaled = dy * scale.reshape((1,) * (dy.ndim - len(outputs)) + values.shape[contract:]).astype(dy.dtype)
    if scheme.gradient_dtype is None:
        kernel = values.astype(dy.dtype)
    else:
        scaled = quantized(scaled, dy_outputs, scheme.gradient_dtype)
        kernel = _as_factor(values, jnp.ones((1,) * values.ndim, scale.dtype))
    return multiply(scaled, kernel, dy_outputs, outputs, dy.dtype), None, None


integer_linear.defvjp(_integer_forward, _integer_backward)


def _as_factor(values: Array, scale: Array) -> Any:
    """Return int8 integers and their scale, of size 1 along the axes to sum over, as a factor of `multiply`."""
    return _qwix().QArray(values, scale, None, values.dtype)


def _qwix() -> ModuleType:
    try:
        import qwix
    except ImportError as error:
        raise ConfigError(
            f"execution.quantization needs the package qwix, which can't be imported ({error}). Install it, {INSTALL}, "
            f"or set execution.quantization to none."
        ) from error
    return qwix
