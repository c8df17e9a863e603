"""Reading of the arrays in an Orbax checkpoint: a nested dictionary of arrays in one directory.

Orbax reads metadata in JSON and arrays through TensorStore; nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree

from transformer.config._untrusted import regular_file
from transformer.zoo.weights._header import MAX_RANK, TensorInfo, WeightsError

METADATA = "_METADATA"
"""File in the directory of every checkpoint of `StandardCheckpointer` and `PyTreeCheckpointer`."""
ITEM = "default"
"""Directory of the arrays in a checkpoint of `Checkpointer` or `CheckpointManager`, such as those of Kauldron."""
MAX_ARRAYS = 100_000
"""Maximum number of arrays of a checkpoint."""
MAX_RATIO = 100
"""Maximum ratio of the size of the arrays to that of the files: a larger one is an attack, not compression."""

Keys = tuple[str, ...]
"""Keys of nested dictionaries."""


def arrays_directory(directory: str | os.PathLike) -> Path | None:
    """Return the directory of the arrays of an Orbax checkpoint, or None if there is no checkpoint."""
    places = (Path(directory), Path(directory) / ITEM)
    return next((place for place in places if (place / METADATA).is_file()), None)


class OrbaxArrays:
    """The arrays of an Orbax checkpoint, `arrays` by their keys. Opening it reads only the metadata.

    WeightsError if the metadata are damaged, or describe arrays that the files can't contain.
    """

    arrays: dict[Keys, TensorInfo]

    def __init__(self, directory: Path):
        # Imported here because the import is slow, and most programs do not need it.
        import orbax.checkpoint as ocp
        from etils import epath

        self._directory, self._path = directory, epath.Path(directory).absolute()
        stored = self._stored_bytes()
        self._handler = ocp.PyTreeCheckpointHandler()
        try:
            metadata = self._handler.metadata(self._path)
        except Exception as error:  # Orbax raises errors of many types for damaged files
            raise self._error(f"its metadata can't be read ({type(error).__name__}: {error!s:.200})") from None
        tree = getattr(metadata, "tree", metadata)
        self.arrays = {}
        for keys, leaf in _flat(tree, ()):
            shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
            if not isinstance(shape, tuple) or dtype is None:
                raise self._error(f"{'/'.join(keys)} is not an array")
            if len(shape) > MAX_RANK or not all(type(size) is int and size >= 0 for size in shape):
                raise self._error(f"{'/'.join(keys)} has the shape {shape!r:.80}")
            self.arrays[keys] = TensorInfo("/".join(keys), np.dtype(dtype), shape, directory, 0)
        if len(self.arrays) > MAX_ARRAYS:
            raise self._error(f"it has {len(self.arrays):,} arrays: expected at most {MAX_ARRAYS:,}")
        if (needed := sum(info.nbytes for info in self.arrays.values())) > MAX_RATIO * stored:
            raise self._error(f"its arrays take {needed:,} bytes, but its files only {stored:,}")

    def _stored_bytes(self) -> int:
        """Return the size of all files; a link that leads outside the directory is an error."""
        total = 0
        for path in self._directory.rglob("*"):
            if path.is_symlink() or not path.is_dir():
                try:
                    total += regular_file(self._directory, str(path.relative_to(self._directory))).stat().st_size
                except ValueError as error:
                    raise self._error(str(error)) from None
        return total

    def read(self, keys: Keys) -> np.ndarray:
        """Read one array, in the dtype in which it is stored; raise WeightsError if its files are damaged."""
        import orbax.checkpoint as ocp

        args = ocp.args.PyTreeRestore(
            item=_nested(keys, 0),
            restore_args=_nested(keys, ocp.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        try:
            found = dict(_flat(self._handler.restore(self._path, args=args), ()))[keys]
        except Exception as error:  # as above
            text = f"{'/'.join(keys)} can't be read ({type(error).__name__}: {error!s:.200})"
            raise self._error(text) from None
        array, info = np.asarray(found), self.arrays[keys]
        if (array.shape, array.dtype) != (info.shape, info.dtype):
            raise self._error(
                f"{info.name}: expected {info.dtype} of shape {info.shape}, got {array.dtype} of {array.shape}"
            )
        return array

    def _error(self, problem: str) -> WeightsError:
        return WeightsError(f"{self._directory} is not a valid Orbax checkpoint: {problem}. Download it again.")


def _flat(tree: PyTree, above: Keys) -> list[tuple[Keys, Any]]:
    """Return the leaves of nested dictionaries with their keys."""
    if not isinstance(tree, Mapping):
        return [(above, tree)]
    return [one for key, part in tree.items() for one in _flat(part, (*above, str(key)))]


def _nested(keys: Keys, leaf: object) -> PyTree:
    """Return nested dictionaries with a single leaf."""
    for key in reversed(keys):
        leaf = {key: leaf}
    return leaf
