"""Dequantization of integers that are packed into 32-bit words: the formats of GPTQ and AWQ.

Both store a matrix as integers q, with a scale s and a zero point z for each output and each group of inputs; the
weight is (q - z) s. The formats are those of AutoGPTQ (Frantar et al. 2022, arXiv 2210.17323) and of AutoAWQ's kernel
`gemm` (Lin et al. 2023, arXiv 2306.00978).
"""

from __future__ import annotations

import numpy as np

WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of the eight integers in a word of AWQ, from the lowest bits to the highest."""


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the integers in 32-bit words, lowest bits first: (...,) -> (..., 32 / bits) uint8."""
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)


def from_gptq(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray, bits: int, offset: int
) -> np.ndarray:
    """Dequantize a matrix of GPTQ to (out, in) in float32.

    `qweight` (in bits / 32, out) is int32, packed along the inputs, and `qzeros` (groups, out bits / 32) along the
    outputs; `scales` are (groups, out). `g_idx` (in,) is the group of each input, in any order ("act order"). `offset`
    is added to the zero points: 1, and 0 in the second version of the format.
    """
    words, out = qweight.shape
    inputs = words * WORD // bits
    codes = _unpacked(qweight, bits).transpose(0, 2, 1).reshape(inputs, out)
    zeros = _unpacked(qzeros, bits).reshape(len(scales), out).astype(np.float32) + offset
    # An integer of 9 bits times a float16 is exact in float32.
    return ((codes.astype(np.float32) - zeros[g_idx]) * scales.astype(np.float32)[g_idx]).T


def from_awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize a matrix of AWQ to (out, in) in float32.

    `qweight` (in, out / 8) and `qzeros` (groups, out / 8) are int32, packed along the outputs in the order
    `_AWQ_ORDER`; `scales` are (groups, out).
    """
    inputs = len(qweight)
    places = np.argsort(_AWQ_ORDER)
    codes = _unpacked(qweight, 4)[..., places].reshape(inputs, -1).astype(np.float32)
    zeros = _unpacked(qzeros, 4)[..., places].reshape(len(scales), -1).astype(np.float32)
    groups = np.arange(inputs) // (inputs // len(scales))
    return ((codes - zeros[groups]) * scales.astype(np.float32)[groups]).T
