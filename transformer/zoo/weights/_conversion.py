"""Conversion between the tensors of a directory and the parameters of a model.

Either all parameters are loaded, or one error lists all problems.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from transformer.config._checks import shortened
from transformer.zoo.weights._files import WeightFiles, WeightsError, first_non_finite
from transformer.zoo.weights._rules import Link, Shape

ALIGNMENT = 64
"""Alignment in bytes with which JAX uses a host array on CPU without copying it."""
_COLUMNS = 8
SHOWN = 20
"""Maximum number of entries of a list in an error message."""


def parameter_shapes(params: PyTree) -> dict[str, Shape]:
    """Return shapes by path for a tree of parameters (or of their shapes)."""
    return {path: leaf.shape for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items()}


def parameter_dtypes(params: PyTree) -> dict[str, np.dtype]:
    """Return dtypes by path for a tree of parameters (or of their shapes)."""
    return {path: leaf.dtype for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items()}


def check_complete(
    files: WeightFiles,
    links: Sequence[Link],
    shapes: Mapping[str, Shape],
    ignored: Sequence[str] = (),
    copies: Mapping[str, str] | None = None,
) -> None:
    """Check that the tensors of the files are exactly those that the links need.

    Args:
        files: the opened directory.
        links: relations between tensors and parameters.
        shapes: shapes of the parameters by path.
        ignored: patterns (matched against whole names) of known tensors that are not needed: buffers, other heads.
        copies: optional tensors -> the tensor that they must equal, for tied maps.

    Raises:
        WeightsError: tensors are missing, unexpected, have a wrong shape or dtype, or copies differ. The message lists
            all of them.
    """
    expected: dict[str, Shape] = {}
    for one in links:
        expected |= zip(one.tensors, one.relation.tensor_shapes(one.shapes(shapes)), strict=True)
    known = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or "(?!)")
    copies = {copy: of for copy, of in (copies or {}).items() if copy not in expected and not known.fullmatch(copy)}
    unexpected = [name for name in files.tensors if name not in expected and name not in copies]
    unexpected = [name for name in unexpected if not known.fullmatch(name)]
    faults = {
        "missing": _missing(files, expected, unexpected),
        "unexpected": unexpected,
        **_wrong_contents(files, expected),
        "in conflict with config.json": _unequal_copies(files, copies),
    }
    problems = [f"{len(found)} {what}: {shortened(found, SHOWN)}" for what, found in faults.items() if found]
    if problems:
        raise WeightsError(
            f"the tensors in {files.directory} don't fit its {files.config_file}. {'. '.join(problems)}. Check that "
            f"the files belong together. Nothing was loaded."
        )


def _missing(files: WeightFiles, expected: Mapping[str, Shape], unexpected: Sequence[str]) -> list[str]:
    """Return the expected tensors that are missing, each with the unexpected tensor of the most similar name."""
    missing = [name for name in expected if name not in files.tensors]
    # Compare only the names that the error shows: comparing every pair takes hours for a model with many experts.
    close = {name: difflib.get_close_matches(name, unexpected[:1000], n=1, cutoff=0.9) for name in missing[:SHOWN]}
    return [name + (f" (there is {found[0]})" if found else "") for name, found in close.items()] + missing[SHOWN:]


def _wrong_contents(files: WeightFiles, expected: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return the expected tensors that have a wrong shape, or that contain integers or complex numbers."""
    found = [(name, shape, files.tensors[name]) for name, shape in expected.items() if name in files.tensors]
    return {
        "of a wrong shape": [
            f"{name}: expected {shape}, got {tensor.shape}" for name, shape, tensor in found if tensor.shape != shape
        ],
        "not floating-point": [
            f"{name} of {tensor.dtype}"
            for name, shape, tensor in found
            if shape and tensor.dtype.kind in "biuc"  # a scalar may be a counter, such as num_batches_tracked
        ],
    }


def _unequal_copies(files: WeightFiles, copies: Mapping[str, str]) -> list[str]:
    """Return the tensors that differ from the tensor to which the config ties them."""
    return [
        f"{copy} differs from {of}, to which it is tied"
        for copy, of in copies.items()
        if copy in files.tensors and of in files.tensors and not np.array_equal(files.read(copy), files.read(of))
    ]


def load_params(
    files: WeightFiles,
    links: Sequence[Link],
    shapes: Mapping[str, Shape],
    dtype: DTypeLike | Mapping[str, np.dtype],
    place: Callable[[str, np.ndarray], jax.Array],
) -> dict[str, Any]:
    """Load the parameters.

    Memory: in addition to the parameters, the host holds the tensors of one link, and on accelerators the parameters
    that are not complete yet. On CPU, buffers become JAX arrays without a copy.

    Args:
        files: the opened directory.
        links: relations between tensors and parameters.
        shapes: shapes of the parameters by path.
        dtype: dtype of all parameters, or a mapping from path to dtype.
        place: function that turns a path and a host array into a JAX array.

    Returns:
        The parameters as a nested dictionary.

    Raises:
        WeightsError: tensors contain NaN, infinity, or values outside the range of the dtype; the message lists them.
    """
    dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(shapes, dtype)
    # Number of parts (layers, experts) of each parameter that are still to be loaded.
    waiting: dict[str, int] = {}
    for target in (target for one in links for target in one.targets):
        waiting[target.path] = waiting.get(target.path, 0) + 1
    buffers: dict[str, np.ndarray] = {}
    params: dict[str, jax.Array] = {}
    broken: list[str] = []
    beyond: list[str] = []
    # Sorted by parameter, so that few parameters are incomplete at any time.
    for one in sorted(links, key=lambda one: one.targets[0].path):
        tensors = [files.read(name) for name in one.tensors]
        for name, tensor in zip(one.tensors, tensors, strict=True):
            if (index := first_non_finite(tensor)) is not None:
                broken.append(f"{name}{list(index)} is {tensor[index]}")
        # A stacked parameter is filled part by part. When it is complete, it moves to the device and its buffer
        # is freed.
        for target, part in zip(one.targets, one.relation.load(tensors, one.shapes(shapes)), strict=True):
            buffer = buffers.setdefault(target.path, None)
            if buffer is None:
                buffer = buffers[target.path] = aligned(shapes[target.path], dtypes[target.path])
            with np.errstate(over="ignore"):  # overflows are reported as errors below
                _copy(buffer[target.index], part)
            # A finite tensor that is infinite in the buffer has overflowed.
            if overflows(part.dtype, buffer.dtype) and first_non_finite(buffer[target.index]) is not None:
                beyond.append(f"{', '.join(one.tensors)} ({buffer.dtype})")
            waiting[target.path] -= 1
            if not waiting[target.path]:
                params[target.path] = place(target.path, buffers.pop(target.path))
    if broken:
        raise WeightsError(
            f"{files.directory} contains numbers that are not finite: {shortened(broken, SHOWN)}. The checkpoint is "
            f"damaged, or its training diverged. Download it again, or use an earlier one."
        )
    if beyond:
        raise WeightsError(
            f"{files.directory} contains numbers outside the range of the dtype: "
            f"{shortened(list(dict.fromkeys(beyond)), SHOWN)}. Pass another dtype=, such as bfloat16."
        )
    return flax.traverse_util.unflatten_dict(params, sep="/")


def overflows(given: np.dtype, to: np.dtype) -> bool:
    """Return whether casting finite numbers from one dtype to another can give infinity.

    The factor 2 ignores pairs such as float32 and bfloat16, whose ranges are almost equal.
    """
    return float(jnp.finfo(given).max) > 2 * float(jnp.finfo(to).max)


def _copy(to: np.ndarray, values: np.ndarray) -> None:
    """Compute to[...] = values, a few columns at a time if `values` is a transposed matrix.

    This takes a fifth of the time for large matrices: the cache lines that one row reads are still in the cache for the
    next row.
    """
    transposed = values.ndim > 1 and values.size > 2**16 and values.strides[0] < values.strides[-1]
    if not transposed:
        to[...] = values
        return
    # View both as matrices whose rows are contiguous in `to`.
    rows = values.shape[0] if values.strides[0] == values.itemsize else values.size // values.shape[-1]
    to, values = to.reshape(rows, -1), values.reshape(rows, -1)
    for start in range(0, values.shape[1], _COLUMNS):
        to[:, start : start + _COLUMNS] = values[:, start : start + _COLUMNS]


def aligned(shape: Shape, dtype: DTypeLike) -> np.ndarray:
    """Return an uninitialized array of this shape that JAX can use on CPU without a copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT  # distance to the next aligned address
    return raw[start : start + size].view(dtype).reshape(shape)


def saved_tensors(links: Iterable[Link], params: PyTree) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yield the name of each tensor and a function that computes it from the parameters.

    Only a few parameters are held on the host at a time.
    """
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    on_host = functools.lru_cache(maxsize=4)(lambda path: np.asarray(jax.device_get(flat[path])))

    def make(one: Link, number: int) -> np.ndarray:
        parts = [on_host(target.path)[target.index] for target in one.targets]
        return np.asarray(one.relation.save(parts)[number], order="C")

    for one in links:
        for number, name in enumerate(one.tensors):
            yield name, functools.partial(make, one, number)
