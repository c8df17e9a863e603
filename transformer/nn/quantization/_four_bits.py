"""Arrays of 4-bit codes, two in a byte, in blocks along one axis. `NF4` and `Int4` store their weights in this form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, DType, Leaf, static
from transformer.nn.quantization._linear import linear
from transformer.nn.quantization._schemes import Scheme


@dataclass(frozen=True)
class FourBits:
    """Base class of 4-bit parameters. Blocks on one axis share a scale; a byte has two weights half a block apart."""

    codes: Leaf  # uint8, two codes per byte; the axis `axis` has half its size, rounded up to whole blocks
    axis: int = static()  # axis of the blocks, counted from the end
    size: int = static()  # size of this axis in the parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        place = self.codes.ndim + self.axis
        return (*self.codes.shape[:place], self.size, *self.codes.shape[place + 1 :])

    def array(self, dtype: DType = jnp.float32) -> Array:
        """Return the dequantized parameter in its original shape."""
        raise NotImplementedError(f"{type(self).__name__} does not define the meaning of its codes.")

    def product(self, x: Array, contract: int = 1, quantization: Scheme | None = None) -> Array:
        """Multiply x by the kernel, as `Encoded`."""
        return linear(x, self.array(x.dtype), contract=contract, quantization=quantization)

    def _decoded(self, decode: Callable[[Array], Array], scale: Array, dtype: DType) -> Array:
        """Return the parameter: `decode` of the codes times the scale of their block."""
        place = self.codes.ndim + self.axis
        codes = unpacked(self.codes, place, scale.shape[place])
        # In float32, and rounded once: the scale may have more significant bits than a 16-bit dtype.
        weights = decode(codes) * jnp.expand_dims(scale, place + 1).astype(jnp.float32)
        return out_of_blocks(weights, place, self.size).astype(dtype)


def in_blocks(array: jax.Array, place: int, most: int) -> jax.Array:
    """Split the axis `place` of an array into blocks: (..., size, ...) -> (..., blocks, length, ...).

    The length is the largest even divisor of the size of at most `most`, which is even; an odd axis gets one zero more.
    """
    size = array.shape[place]
    even = size + size % 2
    length = next(length for length in range(most, 0, -2) if even % length == 0)
    padding = [(0, even - size if i == place else 0) for i in range(array.ndim)]
    return jnp.pad(array, padding).reshape(*array.shape[:place], -1, length, *array.shape[place + 1 :])


def packed(codes: jax.Array, place: int) -> jax.Array:
    """Pack codes from 0 to 15, half a block apart, into bytes: (..., length, ...) -> (..., length / 2, ...)."""
    # Byte j is code j + 16 code (j + length / 2).
    low, high = jnp.split(codes.astype(jnp.uint8), 2, place + 1)
    return (low | (high << 4)).reshape(*codes.shape[:place], -1, *codes.shape[place + 2 :])


def unpacked(codes: jax.Array, place: int, blocks: int) -> jax.Array:
    """Return the codes (..., blocks, length, ...) of the bytes of `packed`."""
    pairs = codes.reshape(*codes.shape[:place], blocks, -1, *codes.shape[place + 1 :])
    return jnp.concatenate([pairs & 15, pairs >> 4], place + 1)


def out_of_blocks(blocks: jax.Array, place: int, size: int) -> jax.Array:
    """Undo `in_blocks`: join the blocks of the axis `place`, and cut it to its `size`."""
    joined = blocks.reshape(*blocks.shape[:place], -1, *blocks.shape[place + 2 :])
    return jax.lax.slice_in_dim(joined, 0, size, axis=place)
