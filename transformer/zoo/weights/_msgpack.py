"""Reading of the headers of Flax's msgpack files: names, dtypes, shapes and offsets of arrays.

A file is one msgpack object (https://github.com/msgpack/msgpack/blob/master/spec.md): nested maps with text keys, whose
leaves are extensions of type 1. Such an extension contains an array (shape, name of the dtype, bytes of the data), as
`flax.serialization` writes it. An array of more than 1 GiB is a map with its shape and its parts. The data itself is
skipped, and no size is trusted: each one is compared with the size of the file first.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from transformer.zoo.weights._header import MAX_NAME, MAX_RANK

MAX_DEPTH = 32
"""Maximum depth of nested maps."""
MAX_ENTRIES = 1_000_000
"""Maximum number of entries of all maps together."""
_ARRAY, _SCALAR = 1, 3
"""Types of extensions that contain an array."""
_CHUNKED = "__msgpack_chunked_array__"
_DTYPES = {
    **{name: np.dtype(name) for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")},
    **{name: np.dtype(name) for name in ("uint64", "float16", "float32", "float64")},
    "bfloat16": np.dtype(jnp.bfloat16),
}


@dataclass(frozen=True)
class Part:
    """A part of an array: `nbytes` bytes at `offset` in the file."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class FlaxArray:
    """An array in a msgpack file, in C order."""

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def read_arrays(file: Path) -> dict[tuple[str, ...], FlaxArray]:
    """Return the arrays of a file by the keys that lead to them, not their data; a ValueError says what is wrong."""
    with file.open("rb") as stream:
        reader = _Reader(stream, file.stat().st_size)
        root = reader.value(0)
        if stream.tell() != reader.size:
            raise ValueError(f"{reader.size - stream.tell()} bytes follow its object: it is not a file of Flax")
    if not isinstance(root, dict):
        raise ValueError(f"its object must be a map of parameters, got {_kind(root)}: it is not a file of Flax")
    arrays: dict[tuple[str, ...], FlaxArray] = {}
    _collect(root, (), arrays)
    return arrays


def _collect(tree: dict[str, Any], path: tuple[str, ...], arrays: dict[tuple[str, ...], FlaxArray]) -> None:
    for key, value in tree.items():
        here = (*path, key)
        if isinstance(value, dict) and _CHUNKED in value:
            arrays[here] = _joined(value, here)
        elif isinstance(value, dict):
            _collect(value, here, arrays)
        elif isinstance(value, FlaxArray):
            arrays[here] = value
        elif value is not None:
            raise ValueError(f"{'/'.join(here)!r:.200} must be an array, got {_kind(value)}")


def _joined(value: dict[str, Any], path: tuple[str, ...]) -> FlaxArray:
    """Return an array that is stored in parts."""
    shape, chunks = (_in_order(value.get(name)) for name in ("shape", "chunks"))
    valid = shape is not None and bool(chunks) and all(type(size) is int and size >= 0 for size in shape)
    if not valid or not all(isinstance(chunk, FlaxArray) and chunk.dtype == chunks[0].dtype for chunk in chunks):
        raise ValueError(f"{'/'.join(path)!r:.200} must have a shape and parts of one dtype: the file is damaged")
    parts = tuple(part for chunk in chunks for part in chunk.parts)
    expected, got = math.prod(shape) * chunks[0].dtype.itemsize, sum(part.nbytes for part in parts)
    if len(shape) > MAX_RANK or expected != got:
        raise ValueError(f"{'/'.join(path)!r:.200} of shape {shape!r:.80} takes {expected} bytes, but its parts {got}")
    return FlaxArray(chunks[0].dtype, tuple(shape), parts)


def _in_order(value: object) -> list[Any] | None:
    """Return the values of a map with the keys "0", "1", ...; None if it is something else."""
    if not isinstance(value, dict) or list(value) != [str(i) for i in range(len(value))]:
        return None
    return list(value.values())


def _kind(value: object) -> str:
    return {"FlaxArray": "an array", "NoneType": "nothing"}.get(type(value).__name__, type(value).__name__)


class _Reader:
    """Reads msgpack values from a stream; only short texts and numbers are copied to memory."""

    def __init__(self, stream: BinaryIO, size: int):
        self.stream, self.size, self.entries = stream, size, 0

    def value(self, depth: int) -> dict[str, Any] | str | float | FlaxArray | None:
        """Return the next value: a map, a text, a number, an array of Flax, or None."""
        start = self.stream.tell()
        (code,) = self.take(1)
        if code <= 0x7F or code >= 0xE0:  # small integers
            return code if code <= 0x7F else code - 256
        if code in _NUMBERS:
            return struct.unpack(_NUMBERS[code], self.take(struct.calcsize(_NUMBERS[code])))[0]
        if code in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[code]
        if (count := self.count(code, _TEXTS, 0xA0, 0x1F)) is not None:
            return self.text(count)
        if (count := self.count(code, _MAPS, 0x80, 0x0F)) is not None:
            return self.map(count, depth)
        if (count := self.count(code, _EXTENSIONS)) is not None:
            return self.extension(count)
        raise ValueError(f"byte {start} is {code:#04x}, which a file of Flax does not have: it is damaged")

    def count(self, code: int, long: dict[int, int], short: int = 0, mask: int = 0) -> int | None:
        """Return the length that follows or is part of a code; None if the code is of another kind."""
        if mask and code & ~mask & 0xFF == short:
            return code & mask
        if code in _FIXED and long is _EXTENSIONS:
            return _FIXED[code]
        return int.from_bytes(self.take(long[code]), "big") if code in long else None

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        self.require(count)
        return self.stream.read(count)

    def require(self, count: int) -> None:
        """Raise ValueError unless `count` more bytes are in the file."""
        here = self.stream.tell()
        if count > self.size - here:
            raise ValueError(f"{count} bytes are expected at byte {here}, got {self.size - here}: it was cut short")

    def text(self, count: int) -> str:
        if count > MAX_NAME:
            raise ValueError(f"a text has {count} bytes at byte {self.stream.tell()}, expected at most {MAX_NAME}")
        raw = self.take(count)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ValueError(f"a text before byte {self.stream.tell()} is not UTF-8: it is damaged") from None

    def map(self, count: int, depth: int) -> dict[str, Any]:
        self.entries += count
        self.require(2 * count)  # an entry has at least a byte for the key and one for the value
        if depth >= MAX_DEPTH or self.entries > MAX_ENTRIES:
            raise ValueError(f"its maps are nested too deeply or have more than {MAX_ENTRIES} entries")
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str) or not key.isprintable() or key in found:
                raise ValueError(
                    f"a key before byte {self.stream.tell()} must be a new, printable text, got {key!r:.80}"
                )
            found[key] = self.value(depth + 1)
        return found

    def extension(self, count: int) -> FlaxArray:
        """Return the array of an extension with `count` bytes, and skip its data."""
        (kind,) = self.take(1)
        start = self.stream.tell()
        self.require(count)
        if kind not in (_ARRAY, _SCALAR) or self.take(1) != b"\x93":
            raise ValueError(f"the extension at byte {start} is not an array of Flax")
        shape = self.shape()
        name = self.value(MAX_DEPTH)
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise ValueError(f"the array at byte {start} has the dtype {name!r:.80}, expected {', '.join(_DTYPES)}")
        (code,) = self.take(1)
        nbytes = self.count(code, _BINARY)
        if nbytes is None or self.stream.tell() + nbytes != start + count:
            raise ValueError(f"the array at byte {start} does not fill its extension: the file is damaged")
        # Zeros are skipped, because numpy rejects shapes like (0, 2**70), although such an array has no elements.
        if math.prod(shape) * dtype.itemsize != nbytes or math.prod(size for size in shape if size) >= 2**60:
            raise ValueError(f"the array at byte {start}: {dtype} of shape {shape!r:.80} does not take {nbytes} bytes")
        offset = self.stream.tell()
        self.stream.seek(offset + nbytes)
        return FlaxArray(dtype, shape, (Part(offset, nbytes),))

    def shape(self) -> tuple[int, ...]:
        (code,) = self.take(1)
        rank = code & 0x0F if code & 0xF0 == 0x90 else int.from_bytes(self.take(2), "big") if code == 0xDC else None
        if rank is None or rank > MAX_RANK:
            raise ValueError(f"the shape before byte {self.stream.tell()} must have at most {MAX_RANK} sizes")
        sizes = tuple(self.value(MAX_DEPTH) for _ in range(rank))
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError(
                f"the shape before byte {self.stream.tell()} must have sizes of at least 0, got {sizes!r:.80}"
            )
        return sizes


_NUMBERS = dict(zip(range(0xCA, 0xD4), (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True))
"""Code of a number -> its format."""
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Code of a text -> bytes of its length; the following tables, too."""
_MAPS = {0xDE: 2, 0xDF: 4}
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
"""Code of an extension -> its length."""
