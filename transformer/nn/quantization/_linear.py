"""The product of activations and a kernel, which all linear maps use."""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer.nn import _few_rows as few_rows
from transformer.nn._axes import Array, Float
from transformer.nn._partitioning import explicit_spec, in_auto_axes, joined_spec, platform, rows_can_merge
from transformer.nn.quantization._schemes import Scheme, quantized_linear


def linear(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    *,
    contract: int = 1,
    quantization: Scheme | None = None,
    transposed: bool = False,
) -> Float[Array, "..."]:
    """Compute x (..., *in) @ kernel (*in, *out) + bias (*out) -> (..., *out) as one matrix multiplication.

    *in* has `contract` axes; `quantization` says how to quantize the factors. On CPU the leading axes are flattened to
    one: the weight gradient then contracts one axis instead of two, which XLA's CPU matrix multiplications need to run
    at full speed. Not where a mesh axis may split the length: flattening would gather it. `transposed` says that the
    kernel is the transpose of a stored array, which a kernel for few rows would copy.
    """
    # With contract=1 and *out = (N, H), one multiplication (B T, D) @ (D, N H) computes all heads.
    inner, out = math.prod(kernel.shape[:contract]), kernel.shape[contract:]
    lead = x.shape[: x.ndim - contract]
    rows = explicit_spec(x)
    if quantization is None and not transposed and multiplies_few_rows(x, kernel, contract):
        (y,) = few_rows.products(x.reshape(-1, inner), (kernel.reshape(inner, -1),))
        y = y.reshape(*lead, *out)
    elif platform() == "cpu" and rows_can_merge():
        x, kernel = x.reshape(-1, inner), kernel.reshape(inner, -1)
        is_bfloat16 = quantization is None and x.dtype == kernel.dtype == jnp.bfloat16
        if is_bfloat16 and multiplies_bfloat16():
            y = bfloat16_product(x, kernel)
        else:
            y = _multiply(x, kernel, 1, quantization)
        y = y.reshape(*lead, *out)
    else:
        # Without reshaping, because the compiler may gather a sharded array to reshape it. With Explicit mesh axes,
        # where `rows` is the sharding of x, outputs are sharded like the kernel.
        spec = None if rows is None else joined_spec(*rows[: len(lead)], *explicit_spec(kernel)[contract:])
        product = functools.partial(_multiply, contract=contract, quantization=quantization)
        y = in_auto_axes(product, spec)(x, kernel)
    return y if bias is None else y + bias.reshape((1,) * len(lead) + out)


def multiplies_few_rows(x: Float[Array, "..."], kernel: Float[Array, "..."], contract: int = 1) -> bool:
    """Return whether the kernels for few rows of a GPU multiply x (..., *in) by a kernel (*in, *out)."""
    return x.dtype == kernel.dtype and few_rows.apply_to(x, math.prod(x.shape[: x.ndim - contract]))


def _multiply(x: jax.Array, kernel: jax.Array, contract: int, quantization: Scheme | None) -> jax.Array:
    """Multiply x (..., *in) by kernel (*in, *out), where *in has `contract` axes."""
    if quantization is not None:
        # Stored by the remat policy "dots" (`_stacks.py`), which can't see this product: its integers are 4 bytes wide.
        return checkpoint_name(quantized_linear(x, kernel, contract, quantization), "quantized_product")
    axes = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    return jax.lax.dot_general(x, kernel, (axes, ((), ())))


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether XLA (YNNPACK) multiplies bfloat16 matrices on this CPU directly, by compiling a product once."""
    # In another thread, because the caller may be in a trace or a mesh.
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 64), (64, 64))]

    def compiled() -> str:
        return jax.jit(_accumulated).lower(*shapes).compile().as_text()

    with ThreadPoolExecutor(1) as threads:
        return "ynn_fusion" in threads.submit(compiled).result()


def bfloat16_product(x: Float[Array, "R Di"], kernel: Float[Array, "Di Do"]) -> Float[Array, "R Do"]:
    """Compute x @ kernel of bfloat16 matrices on a CPU: sums in float32, and the result in bfloat16."""
    # With sums in bfloat16, or with a single row, XLA would convert both to float32 first.
    rows = x.shape[0]
    x = jnp.concatenate([x, x]) if rows == 1 else x
    return _accumulated(x, kernel)[:rows].astype(jnp.bfloat16)


def _accumulated(x: Array, kernel: Array) -> Array:
    return jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
