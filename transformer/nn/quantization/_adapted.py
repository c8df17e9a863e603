"""Kernels of fine-tuning: frozen 4-bit weights (NF4), and frozen weights with a trained low-rank update (LoRA, DoRA).

Both are pytrees that stand in a tree of parameters where a kernel would be. Layers are scanned, so a layer dequantizes
and updates only its own kernels, and a model never holds a complete copy of its parameters in a larger dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import Array, DType, Float, Leaf, PyTree, static
from transformer.nn.quantization._four_bits import FourBits, in_blocks, packed
from transformer.nn.quantization._linear import linear
from transformer.nn.quantization._schemes import Scheme

NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""the 16 values of the data type 4-bit NormalFloat: quantiles of a normal distribution, with an exact zero (Dettmers et
al. 2023, arXiv 2305.14314, appendix E)"""

NF4_BLOCK = 64
"""number of weights that share a scale (arXiv 2305.14314, section 4)"""


@runtime_checkable
class Encoded(Protocol):
    """A kernel that is not an array: `Int8`, `Int4`, `NF4` or `Adapted`; or `Transposed` or `Widened`, for decoding."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""

    def array(self, dtype: DType) -> Array:
        """Return the kernel as an array."""

    def product(self, x: Array, contract: int = 1, quantization: Scheme | None = None) -> Array:
        """Multiply x (..., *in) by the kernel (*in, *out), `contract` axes of *in*: (..., *out), in the dtype of x."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NF4(FourBits):
    """A 4-bit parameter: levels of `NF4_LEVELS` times a scale, the largest absolute value of a block of 64 weights."""

    absmax: Leaf  # float32, one scale per block; the axis `axis` enumerates the blocks

    def array(self, dtype: DType = jnp.float32) -> Array:
        """Return the dequantized parameter, level * absmax, in its original shape."""
        return self._decoded(_levels_at, self.absmax, dtype)


def _levels_at(codes: Array) -> Array:
    """Look up the level of each code, with a tree of 15 selections: TPUs have no fast lookup in a table."""
    found: list[Array] = [jnp.float32(level) for level in NF4_LEVELS]
    # Bit b chooses between neighboring candidates: 16 -> 8 -> 4 -> 2 -> 1 are left.
    for bit in range(4):
        high = (codes >> bit) & 1 == 1
        found = [jnp.where(high, odd, even) for even, odd in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def quantized_nf4(array: Float[Array, "..."], axis: int) -> NF4:
    """Quantize an array to 4 bits, in blocks along `axis` (counted from the end). Zeros stay exactly zero.

    If 64 does not divide the axis, blocks have the size of the largest even divisor below 64; an odd axis is padded.
    """
    array = jnp.asarray(array, jnp.float32)
    place, size = array.ndim + axis, array.shape[axis]
    blocks = in_blocks(array, place, NF4_BLOCK)
    absmax = jnp.abs(blocks).max(place + 1, keepdims=True)
    # w / absmax is in [-1, 1]; a block of zeros has absmax 0 and is divided by 1, because 0 / 0 is NaN.
    scaled = blocks / jnp.where(absmax == 0.0, 1.0, absmax)
    # The nearest level: count the midpoints between neighboring levels that are below.
    middles = [(low + high) / 2 for low, high in itertools.pairwise(NF4_LEVELS)]
    codes = sum((scaled > middle).astype(jnp.uint8) for middle in middles)
    return NF4(packed(codes, place), axis, size, absmax.squeeze(place + 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A frozen kernel (..., *in, *out) with a low-rank update; I and O are the sizes of *in* and *out* in total.

    It stands for W + scale A B (Hu et al. 2021, arXiv 2106.09685, section 4.1) or, with a magnitude, for DoRA's
    m (W + scale A B) / ||W + scale A B||, with one norm and one magnitude per output (Liu et al. 2024, arXiv
    2402.09353, equation 5).
    """

    kernel: Leaf  # W: an array, `int8.Int8` or `NF4`
    a: Leaf  # A, (..., I, r)
    b: Leaf  # B, (..., r, O)
    magnitude: Leaf | None  # m, (..., O); None: LoRA
    scale: float = static()  # alpha / r, or alpha / sqrt(r)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return self.kernel.shape

    def array(self, dtype: DType = jnp.float32) -> Array:
        """Return the merged kernel in its original shape, computed in float32 and rounded once."""
        # (..., *in, *out) -> (..., I, O), plus (..., I, r) x (..., r, O)
        wide = dense(self.kernel, jnp.float32).reshape(*self.a.shape[:-1], self.b.shape[-1])
        wide = wide + self.scale * jnp.matmul(self.a.astype(jnp.float32), self.b.astype(jnp.float32))
        if self.magnitude is not None:
            wide = wide * self.factor()[..., None, :]
        return wide.reshape(self.shape).astype(dtype)

    def product(self, x: Array, contract: int = 1, quantization: Scheme | None = None) -> Array:
        """Multiply x by the kernel, as `Encoded`, with quantized factors only for W."""
        # x (W + s A B) = x W + s (x A) B: the update is applied to the activations, so that neither A B nor a gradient
        # of the size of W exists. With DoRA each output is then multiplied by m / ||W + s A B||.
        y = linear_frozen(x, self.kernel, contract, quantization)
        inner, outer = self.shape[:contract], self.shape[contract:]
        a, b = self.a.astype(x.dtype), self.b.astype(x.dtype)
        # (..., *in) -> (..., r) -> (..., *out)
        low = linear(x, a.reshape(*inner, -1), contract=contract)
        y = y + linear(low, b.reshape(-1, *outer)) * self.scale
        if self.magnitude is None:
            return y
        factor = self.factor().reshape((1,) * (y.ndim - len(outer)) + outer)
        return y * factor.astype(x.dtype)

    def factor(self) -> Array:
        """Return DoRA's m / ||W + scale A B||, (..., O), in float32."""
        # The norm is constant for the gradient, which saves memory and hardly matters (arXiv 2402.09353, section 4.3).
        a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
        wide = dense(self.kernel, jnp.float32).reshape(*a.shape[:-1], b.shape[-1])
        # Over the inputs: (..., I, O) -> (..., O)
        norm = jnp.linalg.norm(jax.lax.stop_gradient(wide + self.scale * jnp.matmul(a, b)), axis=-2)
        # An output whose weights are all zero has norm 0: it stays zero, and 0 / 0 would be NaN.
        return self.magnitude.astype(jnp.float32) / jnp.where(norm == 0.0, 1.0, norm)


def linear_frozen(x: Array, kernel: Array | Encoded, contract: int = 1, quantization: Scheme | None = None) -> Array:
    """Multiply x by a frozen kernel, (..., *in) -> (..., *out), in its dtype; the backward pass decodes it again."""
    if isinstance(kernel, Adapted):
        return kernel.product(x, contract, quantization)

    def product(x, kernel):
        if isinstance(kernel, Encoded):
            return kernel.product(x, contract, quantization)
        return linear(x, kernel.astype(x.dtype), contract=contract, quantization=quantization)

    return jax.checkpoint(product)(x, kernel)


def dense(kernel: Array | Encoded, dtype: DType) -> Array:
    """Return a kernel as an array in `dtype`: dequantized, and merged with its update."""
    return kernel.array(dtype) if isinstance(kernel, Encoded) else kernel.astype(dtype)


def has_encoded(params: PyTree) -> bool:
    """Return whether a tree of parameters contains quantized or updated kernels."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Encoded))
    return any(isinstance(leaf, Encoded) for leaf in leaves)


def output_norms(kernel: Array | Encoded, shape: tuple[int, ...]) -> Array:
    """Compute the norm of the weights of each output, (..., O), in float32; `shape` is (..., I, O)."""
    return jnp.linalg.norm(dense(kernel, jnp.float32).reshape(shape), axis=-2)


def kernel_parameter(
    module: nn.Module, init: Callable[..., Array], shape: tuple[int, ...], dtype: DType, name: str = "kernel"
) -> Array | np.ndarray | Encoded:
    """Return the parameter `name` of a module: an array, or one of `Encoded`, whose shape must be `shape`."""
    # `module.param` compares the shape of the first leaf with `shape`, and packed leaves have other shapes.
    kernel = module.get_variable("params", name) if module.has_variable("params", name) else None
    if not isinstance(kernel, Encoded):
        return module.param(name, init, shape, dtype)
    if kernel.shape != shape:
        raise ValueError(
            f"the {name} of {'/'.join(module.path)} has shape {kernel.shape}, expected {shape}. Use the parameters of "
            f"this model."
        )
    return kernel
