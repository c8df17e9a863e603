"""Reading of .npz files of big_vision: a zip archive with one array in NumPy's format for each parameter.

Nothing is unpickled: arrays of objects are errors. The headers of all arrays are read first, and compared with the
sizes in the archive, before memory is allocated.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from typing import BinaryIO, ClassVar

import jax.numpy as jnp
import numpy as np

from transformer.config._local_paths import local_path
from transformer.zoo.weights._header import MAX_RANK, TensorInfo, WeightsError, check_name

MAX_ARRAYS = 100_000
"""Maximum number of arrays in an archive."""
MAX_RATIO = 100
"""Maximum ratio of the size of the arrays to that of the archive: a larger one is an attack, not compression."""
_BFLOAT16 = np.dtype("V2")
"""dtype under which NumPy saves bfloat16."""


class NpzFile:
    """The arrays of an .npz file, with the interface of `WeightFiles`: `tensors` by name, and `read`.

    A name is the path of a parameter, such as "Transformer/encoder_norm/scale". Raises FileNotFoundError, or
    WeightsError if the file is damaged, or contains something else than numeric arrays.
    """

    config_file: ClassVar[str] = "variant"
    """What determines the tensors that the file must have, for error messages."""

    def __init__(self, path: str | os.PathLike):
        self.directory = local_path(path, "path")
        if not self.directory.is_file():
            raise FileNotFoundError(f"no file {path}. Pass an .npz file of big_vision.")
        self.tensors: dict[str, TensorInfo] = {}
        self._members: dict[str, str] = {}
        try:
            with zipfile.ZipFile(self.directory) as archive:
                self._open(archive)
        except _DAMAGED as error:
            raise self._error(f"{type(error).__name__}, {error}") from None

    def read(self, name: str) -> np.ndarray:
        """Read one array; raise WeightsError if it does not exist or is damaged."""
        if name not in self.tensors:
            raise WeightsError(f"{self.directory} has no array {name!r}.")
        try:
            with zipfile.ZipFile(self.directory) as archive, archive.open(self._members[name]) as stream:
                array = np.lib.format.read_array(stream, allow_pickle=False)
        except _DAMAGED as error:
            raise self._error(f"array {name!r}: {type(error).__name__}, {error}") from None
        array = array.view(jnp.bfloat16) if array.dtype == _BFLOAT16 else array
        if (array.shape, array.dtype) != (self.tensors[name].shape, self.tensors[name].dtype):
            raise self._error(f"array {name!r}: the file changed while it was open")
        return array

    def _open(self, archive: zipfile.ZipFile) -> None:
        members = archive.infolist()
        total, size = sum(member.file_size for member in members), self.directory.stat().st_size
        if len(members) > MAX_ARRAYS or total > MAX_RATIO * size:
            raise ValueError(
                f"it has {len(members)} arrays of {total} bytes: expected at most {MAX_ARRAYS} arrays and "
                f"{MAX_RATIO} times the size of the archive"
            )
        for member in members:
            name = member.filename.removesuffix(".npy")
            check_name(name)
            if name in self.tensors:
                raise ValueError(f"array {name!r} appears twice")
            with archive.open(member) as stream:
                shape, dtype, header = _header(stream)
            expected = header + math.prod(shape) * dtype.itemsize
            if len(shape) > MAX_RANK or expected != member.file_size:
                raise ValueError(f"array {name!r} takes {expected} bytes, got {member.file_size}")
            dtype = np.dtype(jnp.bfloat16) if dtype == _BFLOAT16 else dtype
            if dtype.kind not in "biuf" and dtype != jnp.bfloat16:
                raise ValueError(f"array {name!r} has the dtype {dtype}: expected numbers")
            self.tensors[name] = TensorInfo(name, dtype, shape, self.directory, 0)
            self._members[name] = member.filename

    def _error(self, problem: str) -> WeightsError:
        problem = " ".join(problem.split())
        return WeightsError(f"{self.directory} can't be read: {problem:.500}. Download the file again.")


_DAMAGED = (zipfile.BadZipFile, ValueError, EOFError, OSError, zlib.error, NotImplementedError, RuntimeError)
"""Errors of the libraries for damaged archives and arrays; RuntimeError is that of encrypted ones."""


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return shape and dtype of an array in NumPy's format, and the size of its header."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"NumPy's format {version} is not supported")
    shape, _, dtype = readers[version](stream)
    if any(size < 0 for size in shape) or math.prod(size for size in shape if size) * dtype.itemsize >= 2**63:
        raise ValueError(f"the shape {shape!r:.80} is impossible")
    return shape, dtype, stream.tell()
