"""Reading and validating of GGUF files, the format of llama.cpp: metadata, and the descriptions of tensors.

A file contains a header, metadata (values by key), descriptions of tensors, and their data
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). No size in a file is trusted: each one is compared with
the size of the file before memory is allocated for it. Only the bytes before the data are read here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from transformer.zoo.weights._gguf_blocks import FORMATS, Blocks
from transformer.zoo.weights._header import MAX_RANK, check_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Supported versions. Version 1 has shorter counts; llama.cpp no longer reads it either."""
MAX_METADATA_BYTES = 512 * 2**20
"""Maximum size of everything before the data. The largest published vocabularies take about 20 MB."""
MAX_TENSORS = 1_000_000
MAX_KEYS = 100_000
MAX_TEXT = 16 * 2**20
"""Maximum number of bytes of one text, such as a chat template."""
DEFAULT_ALIGNMENT = 32

# Types of metadata values: format of `struct` by number. 8 is a text, 9 an array.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
_OTHER_NAMES = ("Q2_K", "Q3_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS")
_OTHER_FORMATS = dict(zip((10, 11, *range(16, 24)), _OTHER_NAMES, strict=True)) | {39: "MXFP4"}
"""Formats of tensors that are not supported, to name them in errors."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file, with its axes in the order of NumPy: `format` describes the encoding of the data."""

    name: str
    shape: tuple[int, ...]
    format: Blocks
    offset: int
    """Start of the data, in bytes from the beginning of the file."""

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) // self.format.size * self.format.nbytes


@dataclass(frozen=True)
class GGUFHeader:
    """Everything in a GGUF file except the data."""

    metadata: Mapping[str, Any]
    """Numbers, texts, lists of texts, and arrays of numbers by key."""
    tensors: Mapping[str, GGUFTensor]


def read_gguf(file: Path) -> GGUFHeader:
    """Read the metadata of a GGUF file and its tensors' descriptions; a ValueError says where it can't be read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        reader = _Reader(stream, size)
        if (magic := reader.take(min(4, size))) != MAGIC:
            raise ValueError(f"it must begin with {MAGIC.decode()}, got {magic!r}: it is not a GGUF file")
        version = reader.number("<I")
        if version not in VERSIONS:
            hint = ", which a computer with another byte order wrote" if version in (2 << 24, 3 << 24) else ""
            raise ValueError(f"its version must be one of {', '.join(map(str, VERSIONS))}, got {version}{hint}")
        tensors, keys = reader.number("<Q"), reader.number("<Q")
        # A tensor takes at least 24 bytes (name, rank, format, offset), a key at least 13.
        reader.check_count("tensors", tensors, MAX_TENSORS, 24)
        reader.check_count("keys", keys, MAX_KEYS, 13)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = reader.text(limit=65_535)
            if not key.isprintable() or key in metadata:
                raise ValueError(f"a key of its metadata must be new and printable, got {key!r:.80}")
            metadata[key] = reader.value(reader.number("<I"), key)
        described = [reader.tensor() for _ in range(tensors)]
    return GGUFHeader(metadata, _placed(described, metadata, reader.at, size))


def _placed(
    described: list[tuple[str, tuple[int, ...], Blocks, int]], metadata: Mapping[str, Any], end: int, size: int
) -> dict[str, GGUFTensor]:
    """Return the tensors with offsets from the beginning of the file; raise ValueError if their data overlap."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment % 8:
        raise ValueError(f"general.alignment must be a multiple of 8 from 8 to {2**20}, got {alignment!r:.40}")
    start = -(-end // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, blocks, offset in described:
        if name in tensors:
            raise ValueError(f"two tensors have the name {name!r:.80}")
        if offset % alignment:
            raise ValueError(f"tensor {name!r:.80}: its offset {offset} is not a multiple of {alignment}")
        tensors[name] = GGUFTensor(name, shape, blocks, start + offset)
    place = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset < place:
            raise ValueError(f"tensor {tensor.name!r:.80} overlaps another one at byte {tensor.offset}")
        place = tensor.offset + tensor.nbytes
        if place > size:
            raise ValueError(
                f"tensor {tensor.name!r:.80} ends at byte {place}, but the file has {size} bytes: it was cut short"
            )
    return tensors


class _Reader:
    """Reads numbers, texts and arrays from a stream, each of them only if the file is large enough."""

    def __init__(self, stream: BinaryIO, size: int):
        self.stream, self.size, self.at = stream, min(size, MAX_METADATA_BYTES), 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count > self.size - self.at:
            raise ValueError(
                f"{count} bytes are expected at byte {self.at}, got {self.size - self.at}: it was cut short or is "
                f"damaged"
            )
        self.at += count
        return self.stream.read(count)

    def number(self, format: str) -> int | float:
        """Return the next number in a format of `struct`."""
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def check_count(self, what: str, count: int, most: int, nbytes: int) -> None:
        """Raise ValueError for more entries than are allowed or fit into the file, `nbytes` bytes each."""
        most = min(most, (self.size - self.at) // nbytes)
        if count > most:
            raise ValueError(f"it claims {count} {what}: expected at most {most}. It was cut short or is damaged")

    def text(self, limit: int = MAX_TEXT) -> str:
        """Return the next text."""
        count, start = self.number("<Q"), self.at
        if count > limit:
            raise ValueError(f"a text at byte {start} has {count} bytes: expected at most {limit}")
        try:
            return self.take(count).decode()
        except UnicodeDecodeError:
            raise ValueError(f"the text at byte {start} is not UTF-8: the file is damaged") from None

    def value(self, kind: int, key: str) -> float | str | list[str] | np.ndarray:
        """Return the next metadata value."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"{key!r:.80} has the unknown type {kind}: the file is damaged")
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _TEXT:
            self.check_count(f"texts in {key!r:.80}", count, count, 8)
            return [self.text() for _ in range(count)]
        if kind not in _NUMBERS:  # also arrays of arrays, which no published file contains
            raise ValueError(f"{key!r:.80} is an array of the type {kind}: expected numbers or texts")
        dtype = np.dtype("?" if kind == 7 else _NUMBERS[kind])
        self.check_count(f"numbers in {key!r:.80}", count, count, dtype.itemsize)
        raw = np.frombuffer(self.take(count * dtype.itemsize), np.uint8 if kind == 7 else dtype)
        return raw != 0 if kind == 7 else raw

    def tensor(self) -> tuple[str, tuple[int, ...], Blocks, int]:
        """Return name, shape, format and offset (within the data) of the next tensor."""
        name = self.text(limit=4096)
        check_name(name)
        rank = self.number("<I")
        if rank > MAX_RANK:
            raise ValueError(f"tensor {name!r:.80}: expected at most {MAX_RANK} axes, got {rank}")
        shape = tuple(self.number("<Q") for _ in range(rank))[::-1]  # the first axis in the file varies fastest
        kind, offset = self.number("<I"), self.number("<Q")
        if kind not in FORMATS:
            supported = ", ".join(blocks.name for blocks in FORMATS.values())
            raise ValueError(
                f"tensor {name!r:.80} has the format {_OTHER_FORMATS.get(kind, kind)}, which is not supported "
                f"(supported: {supported})"
            )
        blocks = FORMATS[kind]
        # Zeros are skipped, because NumPy rejects shapes like (0, 2**70), although such an array has no elements.
        if math.prod(size for size in shape if size) >= 2**60 or offset >= 2**63:
            raise ValueError(f"tensor {name!r:.80}: shape {shape!r:.80} or offset {offset} is too large")
        if (shape[-1] if shape else 1) % blocks.size:
            raise ValueError(
                f"tensor {name!r:.80}: its last axis must be a multiple of {blocks.size}, the number of weights in a "
                f"block of {blocks.name}, got {shape!r:.80}"
            )
        return name, shape, blocks, offset
