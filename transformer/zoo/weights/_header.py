"""Reading, validating and writing of safetensors headers: names, dtypes, shapes and offsets of tensors.

A file consists of 8 bytes (the length n of the header, little-endian), n bytes of JSON, and the data of the tensors
without gaps (https://github.com/huggingface/safetensors, section "Format"). It has no checksum. Unlike the safetensors
library, this module rejects duplicate names and names with control characters. A name is never used as a path.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer.config._untrusted import parse_json

MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header, as in the safetensors library."""
MAX_NAME = 1024
"""Maximum number of characters of a tensor name."""
MAX_RANK = 32
"""Maximum number of axes of a tensor."""
METADATA = "__metadata__"

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype("bool"),
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}
"""Dtypes by their names in a file. Dtypes smaller than a byte (F4, F6) are not supported."""
DTYPE_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""Names in a file by dtype."""


class WeightsError(ValueError):
    """Raised if a checkpoint can't be read or written. The message names the directory, all problems and a remedy."""


@dataclass(frozen=True)
class TensorInfo:
    """The `name`, `dtype` and `shape` of a tensor in a file, and where its data is stored."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Start of the data, in bytes from the beginning of the file."""

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """Return the tensors in the header of a safetensors file, by name, and problems, with which they must not be used.

    The claimed length of the header is checked against the size of the file before that many bytes are read.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        if len(first) < 8:
            return {}, [f"expected at least 8 bytes, got {size}: the file was cut short"]
        (length,) = struct.unpack("<Q", first)
        if length > min(MAX_HEADER_BYTES, size - 8):
            return {}, [
                f"its header claims a length of {length} bytes: expected at most {min(MAX_HEADER_BYTES, size - 8)} "
                f"(the file has {size}). It was cut short, or is not a safetensors file"
            ]
        raw = stream.read(length)
    if raw[:1] != b"{":
        return {}, ["its header must begin with '{': it is not a safetensors file"]
    try:
        header = parse_json(raw)
    except ValueError as error:
        return {}, [f"its header is not valid JSON: {error}"]
    return check_header(header, file, 8 + length, size)


def check_header(
    header: dict[str, Any], file: Path, data_start: int, size: int
) -> tuple[dict[str, TensorInfo], list[str]]:
    """Return the tensors of a parsed header, and its problems: of every entry, and gaps or overlaps of the tensors.

    The data begins at byte `data_start` of the file, which has `size` bytes.
    """
    metadata = header.pop(METADATA, {})
    problems = []
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append(f"{METADATA} must contain strings by name, got {metadata!r:.80}")
    tensors = {}
    spans = []
    for name, entry in header.items():
        try:
            shape, dtype, begin, end = _entry(name, entry)
        except ValueError as error:
            problems.append(str(error))
            continue
        spans.append((begin, end, name))
        tensors[name] = TensorInfo(name, dtype, shape, file, data_start + begin)
    return tensors, problems or _tiling(spans, size - data_start)


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a valid tensor name: 1 to 1024 printable characters."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name == METADATA:
        raise ValueError(f"tensor {name!r:.80}: a name must have 1 to {MAX_NAME} printable characters, got {len(name)}")


def header_bytes(entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """Return the header of a file with these tensors (dtype and shape by name), stored in this order without gaps.

    The header is padded with spaces to a multiple of 8 bytes, which aligns data that is sorted by element size. The
    metadata contains the format "pt" (PyTorch), because the transformers library rejects files without it.
    """
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    place = 0
    for name, (dtype, shape) in entries.items():
        end = place + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _entry(name: str, entry: object) -> tuple[tuple[int, ...], np.dtype, int, int]:
    """Return the shape, dtype, and start and end offset of one tensor."""
    check_name(name)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: expected dtype, shape and data_offsets, got {entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r:.80}")
    if not _whole(shape) or len(shape) > MAX_RANK:
        raise ValueError(f"tensor {name!r}: shape must be at most {MAX_RANK} non-negative integers, got {shape!r:.80}")
    # Zeros are skipped, because numpy rejects shapes like (0, 2**70), although such an array has no elements.
    if math.prod(size for size in shape if size) * DTYPES[dtype].itemsize >= 2**63:
        raise ValueError(f"tensor {name!r}: shape {shape!r:.80} is too large")
    if not _whole(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: data_offsets must be two non-negative integers, got {offsets!r:.80}")
    expected, got = math.prod(shape) * DTYPES[dtype].itemsize, offsets[1] - offsets[0]
    if expected != got:
        raise ValueError(f"tensor {name!r}: {dtype} of shape {shape!r:.80} takes {expected} bytes, got {got}")
    return tuple(shape), DTYPES[dtype], offsets[0], offsets[1]


def _whole(values: object) -> bool:
    """Return whether a value is a list of non-negative integers."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _tiling(spans: list[tuple[int, int, str]], data_bytes: int) -> list[str]:
    """Return the first problem in the layout of the data: a gap, an overlap, or a wrong total length."""
    place = 0
    for begin, end, name in sorted(spans):
        if begin != place:
            what = "overlaps the previous one" if begin < place else "comes after a gap"
            return [f"tensor {name!r} {what}: expected its data at byte {place}, got {begin}"]
        place = end
    if place != data_bytes:
        what = "the file was cut short" if place > data_bytes else "there is extra data after the last tensor"
        return [f"its tensors take {place} bytes, got {data_bytes}: {what}"]
    return []
