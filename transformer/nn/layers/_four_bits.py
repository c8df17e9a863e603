"""Arrays of 4-bit codes, two in a byte, in blocks along one axis. `NF4` and `Int4` store their weights in this form."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def in_blocks(array: jax.Array, place: int, most: int) -> jax.Array:
    """Split the axis `place` of an array into blocks: (..., size, ...) -> (..., blocks, length, ...).

    The length is the largest even divisor of the size that is at most `most`, an even number. An odd axis gets one zero
    more.
    """
    size = array.shape[place]
    even = size + size % 2
    length = next(length for length in range(most, 0, -2) if even % length == 0)
    padding = [(0, even - size if i == place else 0) for i in range(array.ndim)]
    return jnp.pad(array, padding).reshape(*array.shape[:place], -1, length, *array.shape[place + 1 :])


def packed(codes: jax.Array, place: int) -> jax.Array:
    """Pack codes from 0 to 15 (..., blocks, length, ...) into bytes (..., blocks * length / 2, ...).

    A byte has two codes of a block that are half a block apart.
    """
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


def shape_before(codes: jax.Array, place: int, size: int) -> tuple[int, ...]:
    """Return the shape of the array whose packed codes these are."""
    return (*codes.shape[:place], size, *codes.shape[place + 1 :])
