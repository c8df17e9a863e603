"""Dequantization of tensors, one at a time, when they are read.

- mxfp4 (OCP Microscaling Formats 1.0, sections 5.1 to 5.3): 4-bit floating-point numbers, two per byte (the first in
  the lower half), and one power of two as the scale of each group of 32.
- Blockwise fp8 (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2): 8-bit floating-point numbers, and one scale for
  each block of a matrix, usually 128 x 128.
- GPTQ and AWQ (`_packed.py`): integers of 4 or 8 bits, and a scale and a zero point for each group of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.zoo.weights._files import TensorInfo, WeightFiles, WeightsError
from transformer.zoo.weights._packed import WORD, from_awq, from_gptq

FIELD = "quantization_config"
"""Field of config.json that describes the quantization."""

# The 16 values of FP4 (E2M1: sign, 2 exponent bits, 1 mantissa bit), by their bit pattern.
_HALF_BYTES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Numbers that share one scale in mxfp4.
_GROUP = 32
_BFLOAT16, _FLOAT32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
_BYTES = np.arange(256, dtype=np.uint8)
_FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
_GROUP_SCALES = (np.dtype("float16"), np.dtype(jnp.bfloat16), np.dtype("float32"))
_SCALES = (np.dtype("float32"), np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e8m0fnu))


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize the mxfp4 matrices of E experts to (E, in, out) in bfloat16, which represents these numbers exactly.

    `blocks` are (E, out, in / 32, 16) uint8, two numbers per byte, and `scales` (E, out, in / 32) uint8, exponents e of
    the scales 2^(e - 127).
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
    """Dequantize a blockwise fp8 matrix (out, in) to float32: multiply each block by its scale.

    `scales` are (ceil(out / block[0]), ceil(in / block[1])), one per block of `block` rows and columns.
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
    dtype: np.dtype = _BFLOAT16
    """Dtype for which the files are made."""
    read: np.dtype = _FLOAT32
    """Dtype that `make` returns."""


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
        made[name] = _Made(parts, (experts, groups * _GROUP, out), from_mxfp4, read=_BFLOAT16)
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


def _gptq(tensors: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> tuple[dict[str, _Made], list[str]]:
    bits, version = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    expected = {"bits": (bits, (4, 8)), "checkpoint_format": (version, ("gptq", "gptq_v2", None))}
    expected |= {"dynamic": (settings.get("dynamic") or None, (None,))}
    expected |= {"is_marlin_format": (settings.get("is_marlin_format", False), (False, None))}
    if problems := _unsupported(expected):
        return {}, problems
    # The first version of the format stores z - 1, the second one z.
    offset = 0 if version == "gptq_v2" else 1

    def one(name: str, weight: TensorInfo, parts: Mapping[str, TensorInfo]) -> _Made | str:
        inputs, out = weight.shape[0] * WORD // bits, weight.shape[1]
        size = settings.get("group_size", -1)
        size, groups = (inputs, 1) if size == -1 else (size, _groups(size, inputs))
        shapes = {"qzeros": (groups, out * bits // WORD), "scales": (groups, out), "g_idx": (inputs,)}
        if groups is None or (wrong := _mismatch({part: shapes[part] for part in parts}, parts)):
            return f"group_size must be above 0, got {size!r:.40}" if groups is None else wrong
        names = (f"{name}.qweight", *(f"{name}.{part}" for part in ("qzeros", "scales", "g_idx") if part in parts))

        def make(weight: np.ndarray, zeros: np.ndarray, scales: np.ndarray, order: np.ndarray | None = None):
            order = np.arange(inputs) // size if order is None else order
            if order.min() < 0 or order.max() >= groups:
                raise WeightsError(
                    f"{name}.g_idx must contain groups from 0 to {groups - 1}, got {order.min()} to {order.max()}. The "
                    f"file is damaged: download it again."
                )
            return from_gptq(weight, zeros, scales, order, bits, offset)

        return _Made(names, (out, inputs), make, parts["scales"].dtype)

    optional = () if settings.get("desc_act") else ("g_idx",)
    return _by_module(tensors, ("qzeros", "scales", "g_idx"), optional, one)


def _awq(tensors: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> tuple[dict[str, _Made], list[str]]:
    version = settings.get("version", "gemm")
    expected = {"bits": (settings.get("bits", settings.get("w_bit")), (4,))}
    expected |= {"version": (version.lower() if isinstance(version, str) else version, ("gemm",))}
    expected |= {"zero_point": (settings.get("zero_point", True), (True,))}
    if problems := _unsupported(expected):
        return {}, problems

    def one(name: str, weight: TensorInfo, parts: Mapping[str, TensorInfo]) -> _Made | str:
        inputs, out = weight.shape[0], weight.shape[1] * WORD // 4
        size = settings.get("group_size", settings.get("q_group_size", 128))
        size, groups = (inputs, 1) if size == -1 else (size, _groups(size, inputs))
        if groups is None or inputs % size:
            return f"group_size does not divide {inputs} inputs"
        if wrong := _mismatch({"qzeros": (groups, weight.shape[1]), "scales": (groups, out)}, parts):
            return wrong
        names = (f"{name}.qweight", f"{name}.qzeros", f"{name}.scales")
        return _Made(names, (out, inputs), from_awq, parts["scales"].dtype)

    return _by_module(tensors, ("qzeros", "scales"), (), one)


def _unsupported(expected: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> list[str]:
    """Return one sentence for each setting whose value is not among the supported ones."""
    return [
        f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r:.40}"
        for name, (value, choices) in expected.items()
        if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices)
    ]


def _groups(size: object, inputs: int) -> int | None:
    """Return the number of groups of `size` inputs; None if the size is invalid."""
    return -(-inputs // size) if type(size) is int and size > 0 else None


def _mismatch(shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, TensorInfo]) -> str:
    """Return the first part of a module with a wrong shape or dtype, as a sentence; "" if all are right."""
    for part, shape in shapes.items():
        info = parts[part]
        is_right = info.dtype in _GROUP_SCALES if part == "scales" else info.dtype == np.int32
        if info.shape != shape or not is_right:
            return f"expected {part} {shape}, got {info.shape} of {info.dtype}"
    return ""


def _by_module(
    tensors: Mapping[str, TensorInfo],
    names: Sequence[str],
    optional: Sequence[str],
    one: Callable[[str, TensorInfo, Mapping[str, TensorInfo]], _Made | str],
) -> tuple[dict[str, _Made], list[str]]:
    """Return the dequantized `weight` of every module with a `qweight`, and the problems of modules.

    A module has the other tensors `names`, of which those in `optional` may be missing. `one` is a function from the
    name of a module, its `qweight` and its other tensors to its weight, or to a problem.
    """
    made, problems = {}, []
    for tensor, weight in tensors.items():
        name, _, last = tensor.rpartition(".")
        if last != "qweight":
            continue
        parts = {part: tensors[f"{name}.{part}"] for part in names if f"{name}.{part}" in tensors}
        if missing := [f"{name}.{part}" for part in names if part not in parts and part not in optional]:
            problems.append(f"{tensor} has no matching {', '.join(missing)}")
        elif len(weight.shape) != 2 or weight.dtype != np.int32 or 0 in weight.shape:
            problems.append(f"{tensor}: expected two axes of int32, got {weight.shape} of {weight.dtype}")
        elif isinstance(found := one(name, weight, parts), str):
            problems.append(f"{tensor} {weight.shape}: {found}")
        else:
            made[f"{name}.weight"] = found
    if not made and not problems:
        problems.append("config.json describes quantized weights, but there is no tensor qweight")
    return made, problems


OWN_METHOD = "transformer_zoo"
"""`quant_method` of weights that stay packed in memory (`zoo/_quantized_models.py`)."""
METHODS = {"mxfp4": _mxfp4, "fp8": _fp8, "gptq": _gptq, "awq": _awq}
"""Functions by `quant_method`: (tensors, settings) -> (dequantized tensors by name, problems)."""


class PlainFiles(WeightFiles):
    """A checkpoint directory whose quantized tensors appear as ordinary ones and are dequantized by `read`.

    `tensors` lists them with the dtype for which such files are made: bfloat16, or the dtype of the scales of GPTQ and
    AWQ. Except for mxfp4, `read` returns float32. Raises ConfigError for an unsupported quantization method, and
    WeightsError if quantized tensors don't fit together.
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
            self.tensors[name] = TensorInfo(name, one.dtype, one.shape, first.file, first.offset)

    def read(self, name: str) -> np.ndarray:
        """Read one tensor into a new array, and dequantize it if necessary."""
        if name not in self._made:
            return self._files.read(name)
        one = self._made[name]
        return one.make(*map(self._files.read, one.parts))

    def dtype_read(self, name: str) -> np.dtype:
        """Return the dtype of the array that `read` returns."""
        return self._made[name].read if name in self._made else self._files.dtype_read(name)


def plain_files(files: WeightFiles) -> WeightFiles:
    """Return the files with quantized tensors dequantized (`PlainFiles`), except for those of `OWN_METHOD`."""
    settings = files.config.get(FIELD)
    is_own = isinstance(settings, Mapping) and settings.get("quant_method") == OWN_METHOD
    return files if settings is None or is_own else PlainFiles(files)
