"""Save and restore the arrays of a pytree with Orbax, keyed by their tree path, bit for bit."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct
LeafPath = tuple[str, ...]  # path of a leaf in its pytree, for example ("params", "embedding")


def flatten(tree: PyTree) -> dict[LeafPath, Leaf]:
    """Return a dict from path to leaf, in the order of `jax.tree.leaves`; TypeError if a leaf is not a plain array."""
    leaves = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise TypeError(f"{_name(path)} is a {type(leaf).__name__}, expected an array. Wrap it in numpy.asarray.")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(f"{_name(path)} is a typed random key, expected an array. Store jax.random.key_data(key).")
        leaves[path] = leaf
    return leaves


def nest(leaves: Mapping[LeafPath, Leaf]) -> dict[str, Any]:
    """Return `leaves` as nested dicts. Lists, tuples and dataclasses become dicts keyed by index or field name."""
    nested: dict[str, Any] = {}
    for path, leaf in leaves.items():
        inner = nested
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = leaf
    return nested


def describe(leaves: Mapping[LeafPath, Leaf]) -> list[dict[str, Any]]:
    """Return path, shape and dtype of each leaf as JSON values."""
    return [{"path": list(path), "shape": list(leaf.shape), "dtype": str(leaf.dtype)} for path, leaf in leaves.items()]


def described(entries: Sequence[Mapping[str, Any]]) -> dict[LeafPath, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes that `describe` wrote: its inverse."""
    return {
        tuple(entry["path"]): jax.ShapeDtypeStruct(tuple(entry["shape"]), jnp.dtype(entry["dtype"]))
        for entry in entries
    }


def differences(saved: Mapping[LeafPath, Leaf], wanted: Mapping[LeafPath, Leaf]) -> list[str]:
    """Return one line per leaf that is missing on one side or that differs in shape or dtype. Dtypes are never cast."""
    lines = [f"{_name(path)}: not in the checkpoint" for path in wanted if path not in saved]
    lines += [f"{_name(path)}: only in the checkpoint" for path in saved if path not in wanted]
    for path in (path for path in wanted if path in saved):
        old, new = saved[path], wanted[path]
        if tuple(old.shape) != tuple(new.shape) or old.dtype != new.dtype:
            lines.append(f"{_name(path)}: {_form(old)} in the checkpoint, expected {_form(new)}")
    return lines


def save(directory: Path, leaves: Mapping[LeafPath, Leaf], copied: Callable[[], object]) -> Callable[[], object]:
    """Write the arrays into an existing directory. With several processes, each process writes its own shards.

    Must not be called from a thread with a running asyncio event loop. Calls `copied` as soon as the arrays are copied
    to the host. Returns a function that finalizes the directory: one process calls it after all processes have written.
    """
    filled = _filled(leaves)
    if filled:
        _hear_errors_once()
        # Weights do not compress, and trying costs the cores that train.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        args = ocp.args.PyTreeSave(nest(filled))
        commits = asyncio.run(handler.async_save(epath.Path(directory), args=args))
        copied()
        for commit in commits or ():
            commit.result()
        return lambda: handler.finalize(epath.Path(directory))
    return lambda: None


@functools.cache
def _hear_errors_once() -> None:
    """Suppress the tracebacks that threads and tasks of Orbax and TensorStore print in addition to raising."""

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        left = "exception was never retrieved" in text  # of a Task, a Future, or a _GatheringFuture
        left = left and any(word in text for word in ("orbax", "OCDBT", "os_error_code"))
        return not left and "_SignalingThread.run() raised an exception" not in text

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    before, sys.unraisablehook = sys.unraisablehook, hook
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_new)


def restore(directory: Path, wanted: Mapping[LeafPath, Leaf]) -> dict[LeafPath, Leaf]:
    """Return the saved arrays at the paths of `wanted`, any subset, with the shapes and dtypes as saved.

    A leaf with a sharding is restored as a jax.Array with this sharding, a leaf without one as a jax.Array on the
    default device, and a NumPy array as a NumPy array. ValueError if JAX would truncate a 64-bit array to 32 bits.
    """
    filled = _filled(wanted)
    arrays: dict[LeafPath, Leaf] = {}
    if filled:
        args = ocp.args.PyTreeRestore(
            item=nest(dict.fromkeys(filled, 0)),
            restore_args=nest({path: _restore_args(leaf) for path, leaf in filled.items()}),
            partial_restore=True,
        )
        arrays = flatten(ocp.PyTreeCheckpointHandler().restore(epath.Path(directory), args=args))
    placed = {path: _place(arrays.pop(path, None), leaf) for path, leaf in wanted.items()}
    for path, leaf in wanted.items():
        if placed[path].dtype != leaf.dtype:
            raise ValueError(
                f"{_name(path)} is {leaf.dtype}, which JAX would truncate to {placed[path].dtype}. "
                "Set jax_enable_x64, or request a NumPy array."
            )
    return placed


def _name(path: LeafPath) -> str:
    return "/".join(path)


def _form(leaf: Leaf) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _filled(leaves: Mapping[LeafPath, Leaf]) -> dict[LeafPath, Leaf]:
    return {path: leaf for path, leaf in leaves.items() if math.prod(leaf.shape)}  # Orbax rejects arrays of size 0


def _sharding(leaf: Leaf) -> jax.sharding.Sharding | None:
    """Return the sharding of a leaf; None for NumPy arrays, abstract leaves without one, and uncommitted arrays."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def _restore_args(leaf: Leaf) -> ocp.RestoreArgs:
    if (sharding := _sharding(leaf)) is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=tuple(leaf.shape))


def _place(array: Leaf | None, leaf: Leaf) -> Leaf:
    if array is None:
        array = np.zeros(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray) or isinstance(array, jax.Array):
        return array
    if (sharding := _sharding(leaf)) is not None:
        return jax.device_put(array, sharding)
    return jax.device_put(array, may_alias=False)  # a copy: JAX must not donate memory that NumPy owns
