"""Parameters out of the tensors of a directory, and back: complete, or one error that lists everything."""

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

from transformer.zoo.weights._files import WeightFiles, WeightsError, first_non_finite
from transformer.zoo.weights._rules import Link, Shape

ALIGNMENT = 64
"""bytes; JAX takes a host array that begins at a multiple as it is, without a copy"""
_COLUMNS = 8
SHOWN = 20
"""entries of a list in an error, before it says how many more there are"""


def parameter_shapes(params: Any) -> dict[str, Shape]:
    """Shapes by path of a tree of parameters (or of their shapes)."""
    return {path: leaf.shape for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items()}


def parameter_dtypes(params: Any) -> dict[str, np.dtype]:
    """Dtypes by path of a tree of parameters (or of their shapes)."""
    return {path: leaf.dtype for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items()}


def check_complete(
    files: WeightFiles,
    links: Sequence[Link],
    shapes: Mapping[str, Shape],
    ignored: Sequence[str] = (),
    copies: Mapping[str, str] | None = None,
) -> None:
    """Raises WeightsError with everything that is missing, unexpected, of a wrong shape, or no real numbers.

    Args:
        shapes: of the parameters, by path.
        ignored: patterns (of whole names) of tensors that are known and not needed: buffers, other heads.
        copies: tensors that may be there and must then equal another one: those of tied maps.
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
        "not understood": unexpected,
        **_wrong_contents(files, expected),
        "not what config.json says": _unequal_copies(files, copies),
    }
    told = [f"{len(found)} {what}: {_listed(found)}" for what, found in faults.items() if found]
    if told:
        raise WeightsError(
            f"the tensors in {files.directory} don't fit its config.json. {'. '.join(told)}. Check that the files "
            f"belong together; nothing was loaded."
        )


def _missing(files: WeightFiles, expected: Mapping[str, Shape], unexpected: Sequence[str]) -> list[str]:
    """Expected tensors that no file has, each with the unexpected tensor whose name is closest."""
    missing = [name for name in expected if name not in files.tensors]
    # Only for the names that the error shows: comparing every pair takes hours for a model with many experts.
    return [name + _nearest(name, unexpected[:1000]) for name in missing[:SHOWN]] + missing[SHOWN:]


def _wrong_contents(files: WeightFiles, expected: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Expected tensors that have another shape, or that hold integers or complex numbers."""
    found = [(name, shape, files.tensors[name]) for name, shape in expected.items() if name in files.tensors]
    return {
        "of a wrong shape": [
            f"{name}: expected {shape}, got {tensor.shape}" for name, shape, tensor in found if tensor.shape != shape
        ],
        "no real numbers": [
            f"{name} of {tensor.dtype}"
            for name, shape, tensor in found
            if shape and tensor.dtype.kind in "biuc"  # a scalar may be a counter
        ],
    }


def _unequal_copies(files: WeightFiles, copies: Mapping[str, str]) -> list[str]:
    """Tensors that differ from the tensor to which the config ties them."""
    return [
        f"{copy} differs from {of}, to which it is tied"
        for copy, of in copies.items()
        if copy in files.tensors and of in files.tensors and not np.array_equal(files.read(copy), files.read(of))
    ]


def _nearest(name: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.9)
    return f" (there is {close[0]})" if close else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def load_params(
    files: WeightFiles,
    links: Sequence[Link],
    shapes: Mapping[str, Shape],
    dtype: Any,
    place: Callable[[str, np.ndarray], jax.Array],
) -> dict[str, Any]:
    """The parameters, a nested dictionary of arrays of `dtype` (one for all, or a mapping by path); `place` makes a JAX
    array of a path and its numbers.

    One tensor and, on CPU, no second copy of anything is held beside the parameters; on other devices one parameter.

    Raises:
        WeightsError: a tensor that holds NaN or infinity, or what the dtype can't hold, all of them by name.
    """
    dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(shapes, dtype)
    waiting: dict[str, int] = {}
    for target in (target for one in links for target in one.targets):
        waiting[target.path] = waiting.get(target.path, 0) + 1
    buffers: dict[str, np.ndarray] = {}
    params: dict[str, jax.Array] = {}
    broken: list[str] = []
    beyond: list[str] = []
    # By parameter, so that few of them are unfinished at a time.
    for one in sorted(links, key=lambda one: one.targets[0].path):
        tensors = [files.read(name) for name in one.tensors]
        for name, tensor in zip(one.tensors, tensors, strict=True):
            if (index := first_non_finite(tensor)) is not None:
                broken.append(f"{name}{list(index)} is {tensor[index]}")
        for target, part in zip(one.targets, one.relation.load(tensors, one.shapes(shapes)), strict=True):
            buffer = buffers.setdefault(target.path, None)
            if buffer is None:
                buffer = buffers[target.path] = aligned(shapes[target.path], dtypes[target.path])
            _fill(buffer[target.index], part)
            if overflows(part.dtype, buffer.dtype) and first_non_finite(buffer[target.index]) is not None:
                beyond.append(f"{', '.join(one.tensors)} ({buffer.dtype})")
            waiting[target.path] -= 1
            if not waiting[target.path]:
                params[target.path] = place(target.path, buffers.pop(target.path))
    if broken:
        raise WeightsError(
            f"{files.directory} holds numbers that are not finite: {_listed(broken)}. The checkpoint is damaged, or "
            f"its training failed: get it again, or take an earlier one."
        )
    if beyond:
        raise WeightsError(
            f"{files.directory} holds numbers that this dtype can't: {_listed(list(dict.fromkeys(beyond)))}. Give "
            f"another dtype=, such as bfloat16."
        )
    return flax.traverse_util.unflatten_dict(params, sep="/")


def overflows(given: np.dtype, to: np.dtype) -> bool:
    """Whether finite numbers of one dtype can be infinite as another (but for the few that rounding takes there)."""
    return float(jnp.finfo(given).max) > 2 * float(jnp.finfo(to).max)


def _fill(to: np.ndarray, values: np.ndarray) -> None:
    """to[...] = values. Of a matrix that was turned round a few columns at a time, which takes a fifth of the time: so
    each line of memory that is read is still at hand for the next row.
    """
    with np.errstate(over="ignore"):  # `load_params` tells of it
        _copy(to, values)


def _copy(to: np.ndarray, values: np.ndarray) -> None:
    turned = values.ndim > 1 and values.size > 2**16 and values.strides[0] < values.strides[-1]
    if not turned:
        to[...] = values
        return
    rows = values.shape[0] if values.strides[0] == values.itemsize else values.size // values.shape[-1]
    to, values = to.reshape(rows, -1), values.reshape(rows, -1)
    for start in range(0, values.shape[1], _COLUMNS):
        to[:, start : start + _COLUMNS] = values[:, start : start + _COLUMNS]


def aligned(shape: Shape, dtype: Any) -> np.ndarray:
    """An array of this shape, its numbers not set, that JAX takes over on CPU without a copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def saved_tensors(links: Iterable[Link], params: Any) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Name and maker of every tensor that the rules make of the parameters; few parameters at a time on the host."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    on_host = functools.lru_cache(maxsize=4)(lambda path: np.asarray(jax.device_get(flat[path])))

    def make(one: Link, number: int) -> np.ndarray:
        parts = [on_host(target.path)[target.index] for target in one.targets]
        return np.asarray(one.relation.save(parts)[number], order="C")

    for one in links:
        for number, name in enumerate(one.tensors):
            yield name, functools.partial(make, one, number)
