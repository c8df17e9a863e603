"""Checkpoint directories of transformers' Flax classes: config.json and flax_model.msgpack.

These classes use the names of the PyTorch classes, up to the last part: `kernel`, `scale` and `embedding` are `weight`
there, and kernels are transposed (`load_flax_weights_in_pytorch_model` of transformers 4.57). A directory is therefore
presented with the names and shapes of PyTorch, for which the families have rules.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import numpy as np

from transformer.config._untrusted import regular_file
from transformer.zoo.weights._files import INDEX_FILE, TensorInfo, WeightFiles
from transformer.zoo.weights._header import check_name
from transformer.zoo.weights._msgpack import FlaxArray, read_arrays

FLAX_FILE = "flax_model.msgpack"
_WEIGHTS = ("kernel", "scale", "embedding")
"""Last parts of names that are `weight` in PyTorch."""


class FlaxFiles(WeightFiles):
    """A directory with weights of a Flax class, presented as those of the PyTorch class."""

    weights_file: ClassVar[str] = FLAX_FILE

    _stored: dict[str, tuple[FlaxArray, tuple[int, ...]]]

    def read(self, name: str) -> np.ndarray:
        """Read one tensor, see `WeightFiles.read`. A kernel is a transposed view of the new array."""
        info, (stored, axes) = self._info(name), self._stored[name]
        array = np.empty(stored.shape, info.dtype)
        raw, start = array.reshape(-1).view(np.uint8), 0
        for part in stored.parts:
            self._read_into(raw[start : start + part.nbytes], info, part.offset)
            start += part.nbytes
        return array.transpose(axes)

    def _tensors_of(self, filename: str) -> tuple[dict[str, TensorInfo], list[str]]:
        self._stored = {}
        try:
            path = regular_file(self.directory, filename)
            arrays = read_arrays(path)
        except ValueError as error:
            return {}, [f"{filename}: {error}"]
        if {keys[0] for keys in arrays} == {"params"}:
            arrays = {keys[1:]: array for keys, array in arrays.items() if len(keys) > 1}
        tensors, problems = {}, []
        for keys, array in arrays.items():
            name = ".".join((*keys[:-1], "weight" if keys[-1] in _WEIGHTS else keys[-1]))
            try:
                check_name(name)
            except ValueError as error:
                problems.append(f"{filename}: {error}")
            if name in tensors:
                problems.append(f"{filename}: two arrays are the tensor {name}")
            axes = _axes(len(array.shape), keys[-1] == "kernel")
            shape = tuple(array.shape[axis] for axis in axes)
            tensors[name] = TensorInfo(name, array.dtype, shape, path, array.parts[0].offset)
            self._stored[name] = (array, axes)
        return tensors, problems


def open_files(directory: str | os.PathLike) -> WeightFiles:
    """Open a checkpoint directory: safetensors or, if there are none, the weights of a Flax class."""
    has_tensors = any(os.path.lexists(Path(directory) / name) for name in (WeightFiles.weights_file, INDEX_FILE))
    kind = FlaxFiles if not has_tensors and os.path.lexists(Path(directory) / FLAX_FILE) else WeightFiles
    return kind(directory)


def _axes(rank: int, is_kernel: bool) -> tuple[int, ...]:
    """Return the axes as in PyTorch: (height, width, in, out) -> (out, in, height, width); (in, out) -> (out, in)."""
    if not is_kernel:
        return tuple(range(rank))
    return (3, 2, 0, 1) if rank == 4 else tuple(range(rank))[::-1]
