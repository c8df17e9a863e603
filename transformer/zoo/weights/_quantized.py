"""Quantized tensors as the plain ones that they stand for: made one at a time, as they are read.

- mxfp4 (OCP Microscaling Formats 1.0, sections 5.1 to 5.3): two numbers of four bits a byte, the first in its lower
  half, and a power of two for each 32 of them.
- fp8 in blocks (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2): numbers of eight bits, and a factor for each block
  of a matrix, mostly 128 x 128.
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
"""field of config.json that says how tensors are quantized"""

_HALF_BYTES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_GROUP = 32
_BYTES = np.arange(256, dtype=np.uint8)
_FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
_SCALES = (np.dtype("float32"), np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e8m0fnu))


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Matrices (E, in, out) in bfloat16, which holds every such number, of `blocks` (E, out, in / 32, 16) and `scales`
    (E, out, in / 32), both of bytes.
    """
    experts, out, groups, _ = blocks.shape
    pairs = _pairs()
    result = np.empty((experts, groups * _GROUP, out), np.uint16)
    for expert in range(experts):  # one at a time: places in the table take eight times the memory of bytes
        places = scales[expert].astype(np.uint16)[..., None] * np.uint16(256) + blocks[expert]
        # No place is outside, and "clip" alone takes them without a copy that is checked first: a third of the time.
        result[expert] = pairs.take(places, mode="clip").reshape(out, -1).view(np.uint16).T
    return result.view(jnp.bfloat16)


def _pairs() -> np.ndarray:
    """The two bfloat16 numbers, together a uint32, of each scale and byte: one look-up does the work of many steps."""
    powers = np.append(np.ldexp(np.float32(1.0), np.arange(255) - 127), np.float32(np.nan))  # the last one is no power
    numbers = np.stack([_HALF_BYTES[_BYTES % 16], _HALF_BYTES[_BYTES // 16]], axis=-1)
    with np.errstate(over="ignore"):  # `load_params` finds NaN and infinity, which no sound file has
        return (powers[:, None, None] * numbers).astype(jnp.bfloat16).view(np.uint32).reshape(-1)


def from_fp8(weight: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """`weight` (out, in) times the factor of its block, in float32; `scales` (out / block[0], in / block[1]), rounded
    up where a matrix ends within a block.
    """
    # By a table, which takes half the time of `astype`.
    result = _BYTES.view(weight.dtype).astype(np.float32)[weight.view(np.uint8)]
    for i, row in enumerate(scales.astype(np.float32)):
        result[i * block[0] : (i + 1) * block[0]] *= np.repeat(row, block[1])[None, : weight.shape[1]]
    return result


@dataclass(frozen=True)
class _Made:
    """A tensor that is made of others: `make` of these, read."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[..., np.ndarray]


def _mxfp4(tensors: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> tuple[dict[str, _Made], list[str]]:
    made, problems = {}, []
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        parts = (f"{name}_blocks", f"{name}_scales")
        if parts[1] not in tensors:
            problems.append(f"{parts[0]} is there without {parts[1]}")
            continue
        blocks, scales = (tensors[part] for part in parts)
        right = len(blocks.shape) == 4 and blocks.shape[3] == _GROUP // 2 and blocks.shape[:3] == scales.shape
        if not right or not blocks.dtype == scales.dtype == np.uint8:
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
        return {}, [f"weight_block_size must be two whole numbers above 0, got {block!r}"]
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
"""what each `quant_method` makes of tensors: the plain ones by name, and what is wrong"""


class PlainFiles(WeightFiles):
    """An opened directory, its quantized tensors given as the plain ones that they stand for. Their dtype is said to be
    bfloat16, for which such files are made; of fp8, `read` gives float32.

    Raises:
        ConfigError: a method of quantization that is not read here.
        WeightsError: quantized tensors that don't fit together; all of them.
    """

    def __init__(self, files: WeightFiles):
        settings = files.config[FIELD]
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        if not isinstance(method, str) or method not in METHODS:
            raise ConfigError(
                f"the weights in {files.directory} are quantized by {method or settings!r}, of which there are "
                f"{', '.join(METHODS)} here. Take the weights that they were made of, or make them plain with "
                f"transformers (model.dequantize(), then save_pretrained) and give that directory."
            )
        self._made, problems = METHODS[method](files.tensors, settings)
        if problems:
            raise WeightsError(
                f"quantized tensors in {files.directory} don't fit together: {'; '.join(problems[:20])}. The files are "
                f"damaged or of another method: get them again."
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
        """One tensor, of any shape, in memory of its own; made of its quantized parts, where it has such."""
        if name not in self._made:
            return self._files.read(name)
        one = self._made[name]
        return one.make(*map(self._files.read, one.parts))


def plain_files(files: WeightFiles) -> WeightFiles:
    """The same files, without quantized tensors: `PlainFiles` where config.json says that there are any."""
    return files if files.config.get(FIELD) is None else PlainFiles(files)
