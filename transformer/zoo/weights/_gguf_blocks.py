"""Dequantization of the block formats of ggml, the library behind llama.cpp.

A block contains 32 or 256 consecutive weights of a row. Integers of fewer than 8 bits are packed; one or two float16
scales apply to the whole block. In the K formats, a block has 8 or 16 groups with their own scales, which are
integers times the scale of the block (https://github.com/ggml-org/ggml, `ggml-common.h` and `ggml-quants.c`). The
results are those of the `gguf` package, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

_SMALL, _LARGE = 32, 256
_ROWS = 4096
"""Number of blocks that are dequantized at once, to bound the memory of intermediate results."""


def _scale(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at byte `at` of each block as float32, (B, 1)."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _halves(packed: np.ndarray, group: int) -> np.ndarray:
    """Unpack 4-bit integers, (B, n) -> (B, 2 n): of each `group` bytes the lower halves, then the upper halves."""
    parts = packed.reshape(len(packed), -1, 1, group)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(packed), -1)


def _high_bits(packed: np.ndarray) -> np.ndarray:
    """Unpack the fifth bits of a block of 32 weights, (B, 4) -> (B, 32), multiplied by 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _scale(blocks, 0)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks, 0) * (_halves(blocks[:, 2:], 16).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks, 0) * _halves(blocks[:, 4:], 16).astype(np.float32) + _scale(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    codes = _halves(blocks[:, 6:], 16) | _high_bits(blocks[:, 2:6])
    return _scale(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    codes = _halves(blocks[:, 8:], 16) | _high_bits(blocks[:, 4:8])
    return _scale(blocks, 0) * codes.astype(np.float32) + _scale(blocks, 2)


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack the 8 scales and 8 minima of a K block, 6 bits each, from 12 bytes: two arrays (B, 8)."""
    # Bytes 0 to 3: scales 0 to 3, and the two upper bits of scales 4 to 7. Bytes 4 to 7: the same of the minima.
    # Bytes 8 to 11: the lower halves are the other bits of scales 4 to 7, the upper halves those of the minima.
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _affine(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return d scale code - dmin minimum for blocks that begin with d, dmin and 12 bytes of scales and minima."""
    scales, minima = _six_bits(blocks[:, 4:16])
    by_group = codes.reshape(len(blocks), 8, 32).astype(np.float32)
    factor = (_scale(blocks, 0) * scales.astype(np.float32))[..., None]
    offset = (_scale(blocks, 2) * minima.astype(np.float32))[..., None]
    return (factor * by_group - offset).reshape(len(blocks), _LARGE)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _affine(blocks, _halves(blocks[:, 16:], 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    # Bit i of byte j is the fifth bit of weight 32 i + j.
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)
    return _affine(blocks, _halves(blocks[:, 48:], 32) | (high.reshape(len(blocks), _LARGE) << np.uint8(4)))


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _halves(blocks[:, :128], 64)
    # Of each 32 bytes, the lowest two bits belong to the first 32 weights, the next two to the next 32, and so on.
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | (pairs.reshape(len(blocks), _LARGE) << np.uint8(4))).astype(np.float32) - 32
    factor = _scale(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)  # one per 16 weights
    return (factor[..., None] * codes.reshape(-1, 16, 16)).reshape(len(blocks), _LARGE)


@dataclass(frozen=True)
class Blocks:
    """A format of tensor data: blocks of `size` weights in `nbytes` bytes."""

    name: str
    size: int
    nbytes: int
    dtype: np.dtype
    """Dtype of weights that are not quantized; bfloat16 for quantized ones, the dtype in which they are loaded."""
    dequantized: Callable[[np.ndarray], np.ndarray] | None = None
    """Function from bytes (B, nbytes) to float32 weights (B, size); None: the weights are not quantized."""

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Return the weights in these bytes, (B * nbytes,) uint8 -> (B * size,) in `dtype`, or float32 if quantized."""
        if self.dequantized is None:
            return raw.view(self.dtype)
        blocks = raw.reshape(-1, self.nbytes)
        result = np.empty((len(blocks), self.size), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # `load_params` reports NaN and infinity as errors
            for start in range(0, len(blocks), _ROWS):
                result[start : start + _ROWS] = self.dequantized(blocks[start : start + _ROWS])
        return result.reshape(-1)


_QUANTIZED = np.dtype(jnp.bfloat16)
FORMATS = {
    0: Blocks("F32", 1, 4, np.dtype("<f4")),
    1: Blocks("F16", 1, 2, np.dtype("<f2")),
    30: Blocks("BF16", 1, 2, np.dtype(jnp.bfloat16)),
    2: Blocks("Q4_0", _SMALL, 18, _QUANTIZED, _q4_0),
    3: Blocks("Q4_1", _SMALL, 20, _QUANTIZED, _q4_1),
    6: Blocks("Q5_0", _SMALL, 22, _QUANTIZED, _q5_0),
    7: Blocks("Q5_1", _SMALL, 24, _QUANTIZED, _q5_1),
    8: Blocks("Q8_0", _SMALL, 34, _QUANTIZED, _q8_0),
    12: Blocks("Q4_K", _LARGE, 144, _QUANTIZED, _q4_k),
    13: Blocks("Q5_K", _LARGE, 176, _QUANTIZED, _q5_k),
    14: Blocks("Q6_K", _LARGE, 210, _QUANTIZED, _q6_k),
}
"""Supported formats by their number in a file (`enum ggml_type`)."""
