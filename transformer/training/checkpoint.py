"""Checkpoints that are written whole or not at all, and read only when every byte is right.

`workdir/checkpoints/<step>/` holds `state/` (arrays, written by Orbax), `data.json` or `data.bin`, `recipe.json` and
`manifest.json`. All of it is written into `<step>.tmp`, hashed, forced to the disk, and renamed: that is the commit.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.training import arrays
from transformer.training.manifest import (
    CheckpointError,
    check_sizes,
    read_manifest,
    sync,
    sync_tree,
    verify,
    write_manifest,
)

__all__ = ["CheckpointError", "CheckpointSaveError", "CheckpointWarning", "Checkpointer", "Restored", "load_params"]


class CheckpointSaveError(OSError):
    """A checkpoint that could not be written, found by the save itself or by the next `save`, `wait` or `close`."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over, or moved out of the way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint held."""

    step: int
    state: Any  # in the structure of the abstract state
    data: Any  # what `save` was given as data (JSON values or bytes), None if nothing
    recipe: Any  # what `save` was given as recipe (JSON values), None if nothing
    metric: float | None
    path: str


class Checkpointer:
    """Writes `workdir/checkpoints/<step>/` in the background, keeps the last and the best, reads the newest valid one.

    Use it as a context manager, or call `close`. One process writes: RuntimeError when JAX runs in several.
    """

    def __init__(
        self, workdir: str | os.PathLike, *, keep_last: int = 2, keep_best: int = 1, best: Literal["min", "max"] = "min"
    ):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last must be at least 1 and keep_best at least 0, got {keep_last} and {keep_best}: "
                "without the newest checkpoint no run can go on."
            )
        if best not in ("min", "max"):
            raise ValueError(f"best must be 'min' or 'max', got {best!r}.")
        if jax.process_count() != 1:
            raise RuntimeError(f"Checkpoints are written by one process; JAX runs in {jax.process_count()}.")
        self._root = _root(workdir)
        self._keep_last, self._keep_best, self._best = keep_last, keep_best, best
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future | None = None
        self._newest: int | None = None
        self._damaged: set[int] = set()  # found by reading: they count for nothing when old ones are deleted

    @property
    def newest_step(self) -> int | None:
        """The step that this object saved (or began to save) or restored last, None before any."""
        return self._newest

    def steps(self) -> list[int]:
        """Steps on the disk that look whole (a good manifest, sizes right; nothing is hashed), ascending."""
        return sorted(_whole(self._root))

    def save(
        self, step: int, state: PyTree, *, data: Any = None, recipe: Any = None, metric: float | None = None
    ) -> bool:
        """Starts to save and returns once the arrays are copied to the host (they may be donated or changed then).

        Waits first for a save still in progress. `data` is the data iterator's state (JSON values or bytes), `recipe`
        JSON values, `metric` what "best" is judged by (None and NaN are never best). Returns False, and writes nothing,
        when this step was the last one saved or restored. Raises CheckpointSaveError if an earlier or this save failed.
        """
        self.wait()
        step = int(step)
        if step == self._newest:
            return False
        leaves = arrays.flatten(state)
        items = (
            {"data.bin": data} if isinstance(data, bytes) else {"data.json": json.dumps(data, allow_nan=False).encode()}
        )
        items["recipe.json"] = json.dumps(recipe, allow_nan=False).encode()
        metric = None if metric is None or not math.isfinite(metric) else float(metric)
        self._make_way(step)
        copied = threading.Event()
        self._saving = self._thread.submit(self._write, step, leaves, items, metric, copied)
        self._newest = step
        copied.wait()
        if self._saving.done():  # over already: if it failed, say so here
            self.wait()
        return True

    def wait(self) -> None:
        """Blocks until the save in progress is committed. Raises CheckpointSaveError if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.result()
            except BaseException:
                self._newest = None  # that step may be tried again
                raise

    def close(self) -> None:
        """`wait`, and ends the background thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def restore_newest(self, abstract_state: PyTree) -> Restored | None:
        """The newest valid checkpoint, None when there is none at all.

        `abstract_state` has `jax.ShapeDtypeStruct`s (or arrays) as leaves: one with a sharding is restored as a
        jax.Array laid out so, one without as a jax.Array on the default device, a NumPy array as a NumPy array. Newer
        checkpoints that are damaged are passed over with a warning that names the bad file. Raises CheckpointError
        when there are checkpoints but no valid one, and when structure, shapes or dtypes differ (all in one message).
        """
        self.wait()
        found = _newest_valid(self._root, self._damaged)
        if found is None:
            return None
        directory, manifest = found
        self._newest = manifest["step"]
        return Restored(
            step=manifest["step"],
            state=_restore(directory, manifest, abstract_state),
            data=_item(directory, "data"),
            recipe=_item(directory, "recipe"),
            metric=manifest["metric"],
            path=str(directory),
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except CheckpointSaveError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the first error stays the one that is seen

    def _make_way(self, step: int) -> None:
        """What stands where this step goes (damaged, foreign, or of a run gone back) is kept under another name."""
        final = self._root / str(step)
        if final.exists():
            aside = next(name for name in _names(f"{final}.invalid") if not name.exists())
            try:
                os.rename(final, aside)
            except OSError as error:
                raise _explain(error, final, {}) from error
            warnings.warn(f"{final} was there before this save; it is now {aside}.", CheckpointWarning, stacklevel=3)

    def _write(
        self,
        step: int,
        leaves: dict[arrays.LeafPath, Any],
        items: dict[str, bytes],
        metric: float | None,
        copied: threading.Event,
    ) -> None:
        temporary, final = self._root / f"{step}.tmp", self._root / str(step)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for left_over in self._root.glob("*.tmp"):  # of a process that was killed: there is one writer
                shutil.rmtree(left_over)
            (temporary / "state").mkdir(parents=True)
            arrays.save(temporary / "state", leaves, copied.set)
            for name, content in items.items():
                (temporary / name).write_bytes(content)
            write_manifest(temporary, {"step": step, "metric": metric, "state": arrays.describe(leaves)})
            sync_tree(temporary)
            os.rename(temporary, final)
            sync(self._root)
            self._damaged.discard(step)
            self._delete_old(step)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise _explain(error, final, leaves) from error
        finally:
            copied.set()

    def _delete_old(self, just_saved: int) -> None:
        manifests = {step: manifest for step, manifest in _whole(self._root).items() if step not in self._damaged}
        keep = {just_saved, *sorted(manifests)[-self._keep_last :], *_ranked(manifests, self._best)[: self._keep_best]}
        for step in manifests.keys() - keep:
            doomed = self._root / f"{step}.tmp"  # renamed first: half deleted it must not look like a checkpoint
            os.rename(self._root / str(step), doomed)
            shutil.rmtree(doomed)


def load_params(
    workdir: str | os.PathLike,
    *,
    step: int | Literal["newest", "best"] = "newest",
    names: str | Sequence[str] = "params",
    best: Literal["min", "max"] = "min",
) -> tuple[PyTree, int]:
    """One field of a saved state as nested dicts of jax.Arrays, and its step; the optimizer need not be known.

    `names` is a field of the state, or several: the first that was saved is taken (`("ema", "params")`).
    Raises FileNotFoundError when the workdir has no checkpoint (or not that one), CheckpointError when it is not valid.
    """
    root = _root(workdir)
    steps = _steps(root)
    if not steps:
        raise FileNotFoundError(f"No checkpoint in {root}. Train first, or give the workdir of a run.")
    if step == "newest":
        found = _newest_valid(root, set())
    else:
        ranked = _ranked(_whole(root), best) if step == "best" else [step]
        if not ranked:
            raise CheckpointError(
                f"No checkpoint in {root} carries the metric that 'best' needs. Use 'newest' or a step: {steps}."
            )
        if ranked[0] not in steps:
            raise FileNotFoundError(f"No checkpoint of step {step} in {root}. There are: {', '.join(map(str, steps))}.")
        found = root / str(ranked[0]), _verified(root / str(ranked[0]))
    if found is None:  # deleted by the run that is training, between two looks
        raise FileNotFoundError(f"The checkpoints in {root} vanished while they were read. Try again.")
    directory, manifest = found
    leaves = arrays.described(manifest["state"])
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        chosen = {path: leaf for path, leaf in leaves.items() if path[0] == name}
        if chosen:
            return arrays.nest(arrays.restore(directory / "state", chosen))[name], manifest["step"]
    saved = sorted({path[0] for path in leaves})
    raise CheckpointError(f"{directory} holds none of {', '.join(names)}. It holds: {', '.join(saved)}.")


# Which checkpoints there are


def _root(workdir: str | os.PathLike) -> Path:
    return Path(os.path.abspath(workdir)) / "checkpoints"


def _steps(root: Path) -> list[int]:
    """Every step in `root`, valid or not, ascending; temporary directories and moved ones are no steps."""
    if not root.is_dir():
        return []
    return sorted(
        int(path.name) for path in root.iterdir() if path.name.isdecimal() and path.name == str(int(path.name))
    )


def _whole(root: Path) -> dict[int, dict[str, Any]]:
    """Step -> manifest of those that look whole at a glance."""
    whole = {}
    for step in _steps(root):
        try:
            manifest = read_manifest(root / str(step))
            check_sizes(root / str(step), manifest)
        except CheckpointError:
            continue
        whole[step] = manifest
    return whole


def _ranked(manifests: dict[int, dict[str, Any]], best: str) -> list[int]:
    """Steps that have a metric, the best first; of equal ones the newer."""
    sign = 1 if best == "min" else -1
    scored = [
        (sign * manifest["metric"], -step) for step, manifest in manifests.items() if manifest["metric"] is not None
    ]
    return [-step for _, step in sorted(scored)]


def _verified(directory: Path) -> dict[str, Any]:
    manifest = read_manifest(directory)
    verify(directory, manifest)
    return manifest


def _newest_valid(root: Path, damaged: set[int]) -> tuple[Path, dict[str, Any]] | None:
    """The newest valid one (None: there is none at all), a warning for each newer one; adds those to `damaged`."""
    reasons = []
    for step in reversed(_steps(root)):
        directory = root / str(step)
        try:
            manifest = _verified(directory)
        except CheckpointError as error:
            if directory.exists():  # else the run that is training has just deleted it
                reasons.append(str(error))
                damaged.add(step)
            continue
        for reason in reasons:
            warnings.warn(
                f"Using the checkpoint of step {step}, a newer one is damaged: {reason}.",
                CheckpointWarning,
                stacklevel=3,
            )
        return directory, manifest
    if reasons:
        listed = "\n  ".join(reasons)
        raise CheckpointError(
            f"No valid checkpoint in {root}:\n  {listed}\n"
            "Nothing starts again from step 0 by itself. Put a good copy back, or move the directory away to start "
            f"anew: mv {root} {root}.bad"
        )
    return None


def _names(first: str) -> Iterator[Path]:
    yield Path(first)
    number = 2
    while True:
        yield Path(f"{first}-{number}")
        number += 1


# What is in one


def _restore(directory: Path, manifest: dict[str, Any], abstract: PyTree) -> PyTree:
    wanted, saved = arrays.flatten(abstract), arrays.described(manifest["state"])
    if lines := arrays.differences(saved, wanted):
        listed = "\n  ".join(lines)
        raise CheckpointError(
            f"{directory} does not fit this model and optimizer, {len(lines)} difference(s):\n  {listed}\n"
            "Use the recipe that it was trained with, or another workdir."
        )
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays.restore(directory / "state", wanted).values())


def _item(directory: Path, name: str) -> Any:
    binary = directory / f"{name}.bin"
    return binary.read_bytes() if binary.exists() else json.loads((directory / f"{name}.json").read_bytes())


def _explain(error: Exception, path: Path, leaves: dict[arrays.LeafPath, Any]) -> CheckpointSaveError:
    """Says in one line what Orbax and the system say in many."""
    text = str(error)
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in text or "File too large" in text:
        size = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves.values())
        reason, do = "the disk is full", f"Free some space (one checkpoint takes {size / 1e6:,.1f} MB)"
    elif (
        number in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
        or "Read-only" in text
        or "denied" in text
    ):
        reason, do = f"it cannot be written ({os.strerror(number) if number else text[:200]})", "Make it writable"
    else:
        reason, do = f"{type(error).__name__}: {' '.join(text.split())[:300]}", "Mend that"
    return CheckpointSaveError(
        f"No checkpoint written to {path}: {reason}. Older checkpoints are intact. {do} and run the same command again "
        "to go on from the newest, or choose another workdir."
    )
