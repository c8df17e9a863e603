"""Dequantization of tensors, one at a time, when they are read.

- mxfp4 (OCP Microscaling Formats 1.0, sections 5.1 to 5.3): 4-bit floating-point numbers, two per byte (the first in
  the lower half), and one power of two as the scale of each group of 32.
- Blockwise fp8 (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2): 8-bit floating-point numbers, and one scale for
  each block of a matrix, usually 128 x 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.zoo.weights._files import TensorInfo, WeightFiles, WeightsError

FIELD = "quantization_config"
"""Field of config.json that describes the quantization."""

# The 16 values of FP4 (E2M1: sign, 2 exponent bits, 1 mantissa bit), by their bit pattern.
_HALF_BYTES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Numbers that share one scale in mxfp4.
_GROUP = 32
_BYTES = np.arange(256, dtype=np.uint8)
_FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
_SCALES = (np.dtype("float32"), np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e8m0fnu))


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize the mxfp4 matrices of E experts.

    Args:
        blocks: (E, out, in / 32, 16) uint8, two numbers per byte.
        scales: (E, out, in / 32) uint8, exponents e of the scales 2^(e - 127).

    Returns:
        Matrices (E, in, out) in bfloat16, which represents every such number exactly.
    """
    experts, out, groups, _ = blocks.shape
    pairs = _pairs()
    result = np.empty((experts, groups * _GROUP, out), np.uint16)
    # One expert at a time, because the indices and the numbers need several times the memory of the bytes.
    for expert in range(experts):
        # Index of (scale, byte) in the table: 256 scale + byte. (out, in / 32, 16)
        indices = scales[expert].astype(np.uint16)[..., None] * np.uint16(256) + blocks[expert]
        # All indices are valid. mode="clip" only avoids the bounds check on a copy, and takes a third of the time. Each
        # uint32 entry holds two bfloat16 numbers: (out, in / 2) viewed as uint16 is (out, in).
        result[expert] = pairs.take(indices, mode="clip").reshape(out, -1).view(np.uint16).T
    return result.view(jnp.bfloat16)


def _pairs() -> np.ndarray:
    """Return a table from (scale, byte) to the two bfloat16 numbers of the byte, packed into a uint32: (256 * 256,)."""
    powers = np.append(np.ldexp(np.float32(1.0), np.arange(255) - 127), np.float32(np.nan))  # scale 255 means NaN
    # Lower half of the byte first.
    numbers = np.stack([_HALF_BYTES[_BYTES % 16], _HALF_BYTES[_BYTES // 16]], axis=-1)
    with np.errstate(over="ignore"):  # `load_params` reports NaN and infinity as errors
        return (powers[:, None, None] * numbers).astype(jnp.bfloat16).view(np.uint32).reshape(-1)


def from_fp8(weight: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Dequantize a blockwise fp8 matrix: multiply each block by its scale.

    Args:
        weight: (out, in) in an 8-bit floating-point dtype.
        scales: (ceil(out / block[0]), ceil(in / block[1])), one scale per block.
        block: rows and columns of a block.

    Returns:
        The matrix (out, in) in float32.
    """
    # Look up the float32 value of each of the 256 bit patterns. This takes half the time of `astype`.
    result = _BYTES.view(weight.dtype).astype(np.float32)[weight.view(np.uint8)]
    for i, row in enumerate(scales.astype(np.float32)):
        # Repeat each scale over the columns of its block; the last block may be incomplete.
        result[i * block[0] : (i + 1) * block[0]] *= np.repeat(row, block[1])[None, : weight.shape[1]]
    return result


@dataclass(frozen=True)
class _Made:
    """A dequantized tensor: the names of its parts in the file, its shape, and the function that combines the parts."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[..., np.ndarray]


def _mxfp4(tensors: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> tuple[dict[str, _Made], list[str]]:
    made, problems = {}, []
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        parts = (f"{name}_blocks", f"{name}_scales")
        if parts[1] not in tensors:
            problems.append(f"{parts[0]} has no matching {parts[1]}")
            continue
        blocks, scales = (tensors[part] for part in parts)
        valid = len(blocks.shape) == 4 and blocks.shape[3] == _GROUP // 2 and blocks.shape[:3] == scales.shape
        if not valid or not blocks.dtype == scales.dtype == np.uint8:
            problems.append(
                f"{name}: expected blocks (E, out, G, {_GROUP // 2}) and scales (E, out, G) of bytes, got "
                f"{blocks.shape} of {blocks.dtype} and {scales.shape} of {scales.dtype}"
            )
            continue
        experts, out, groups, _ = blocks.shape
        made[name] = _Made(parts, (experts, groups * _GROUP, out), from_mxfp4)
    return made, problems


def _fp8(tensors: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> tuple[dict[str, _Made], list[str]]:
    block = settings.get("weight_block_size", (128, 128))
    if not isinstance(block, list | tuple) or [type(size) for size in block] != [int, int] or min(block) < 1:
        return {}, [f"weight_block_size must be two positive integers, got {block!r}"]
    made, problems = {}, []
    for name, info in tensors.items():
        if info.dtype not in _FLOAT8:
            continue
        scales = tensors.get(f"{name}_scale_inv")
        expected = tuple(-(-size // side) for size, side in zip(info.shape, block, strict=False))
        if scales is None or len(info.shape) != 2 or scales.shape != expected or scales.dtype not in _SCALES:
            got = "none" if scales is None else f"{scales.shape} of {scales.dtype}"
            problems.append(
                f"{name} {info.shape} in blocks of {block[0]} x {block[1]}: expected {name}_scale_inv {expected}, "
                f"got {got}"
            )
            continue
        parts = (name, f"{name}_scale_inv")
        made[name] = _Made(parts, info.shape, lambda weight, scales: from_fp8(weight, scales, tuple(block)))
    return made, problems


METHODS = {"mxfp4": _mxfp4, "fp8": _fp8}
"""Functions by `quant_method`: (tensors, settings) -> (dequantized tensors by name, problems)."""


class PlainFiles(WeightFiles):
    """A checkpoint directory whose quantized tensors appear as ordinary ones and are dequantized by `read`.

    `tensors` lists them as bfloat16, the dtype for which such files are made. For fp8, `read` returns float32.

    Raises:
        ConfigError: an unsupported quantization method.
        WeightsError: quantized tensors that don't fit together; the message lists them.
    """

    def __init__(self, files: WeightFiles):
        settings = files.config[FIELD]
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        if not isinstance(method, str) or method not in METHODS:
            raise ConfigError(
                f"the weights in {files.directory} are quantized by {method or settings!r}, which is not supported "
                f"(supported: {', '.join(METHODS)}). Use the original weights, or dequantize them with transformers "
                f"(model.dequantize(), then save_pretrained) and pass that directory."
            )
        self._made, problems = METHODS[method](files.tensors, settings)
        if problems:
            raise WeightsError(
                f"quantized tensors in {files.directory} don't fit together: {'; '.join(problems[:20])}. The files are "
                f"damaged or use another method. Download them again."
            )
        self._files = files
        self.directory = files.directory
        self.config = {name: value for name, value in files.config.items() if name != FIELD}
        used = {part for one in self._made.values() for part in one.parts}
        self.tensors = {name: info for name, info in files.tensors.items() if name not in used}
        for name, one in self._made.items():
            first = files.tensors[one.parts[0]]
            self.tensors[name] = TensorInfo(name, np.dtype(jnp.bfloat16), one.shape, first.file, first.offset)

    def read(self, name: str) -> np.ndarray:
        """Read one tensor into a new array, and dequantize it if necessary."""
        if name not in self._made:
            return self._files.read(name)
        one = self._made[name]
        return one.make(*map(self._files.read, one.parts))


def plain_files(files: WeightFiles) -> WeightFiles:
    """Return the files with quantized tensors dequantized: `PlainFiles` if config.json describes a quantization."""
    return files if files.config.get(FIELD) is None else PlainFiles(files)
