"""Checkpoints that are written atomically and verified byte for byte when they are read.

`workdir/checkpoints/<step>/` contains `state/` (arrays, written by Orbax), the state of the data iterator, the recipe
and `manifest.json`. A save writes all files into `<step>.tmp`, hashes them, flushes them to disk (fsync), and then
renames the directory. The rename commits the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.training import _processes as processes
from transformer.training.workdir import _arrays as arrays
from transformer.training.workdir import _manifest as manifests
from transformer.training.workdir._manifest import CheckpointError, CheckpointWarning

__all__ = [
    *("CheckpointError", "CheckpointSaveError", "CheckpointWarning", "Checkpointer", "Restored"),
    *("load_data", "load_items", "load_params"),
]


class CheckpointSaveError(OSError):
    """A checkpoint could not be written. Raised by the save itself, or by the next `save`, `wait` or `close`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """Content of a checkpoint: its `step`, `state`, `data`, `recipe`, `metric` and `path`."""

    step: int
    state: Any  # with the tree structure of the abstract state
    data: Any  # the `data` argument of `save` (JSON values or bytes); None if omitted
    recipe: Any  # the `recipe` argument of `save` (JSON values); None if omitted
    metric: float | None
    path: str


class Checkpointer(contextlib.AbstractContextManager):
    """Writer of `workdir/checkpoints/<step>/` in a background thread, and reader of the newest valid checkpoint.

    Use it as a context manager, or call `close`. If several processes train together, all of them must save and restore
    at the same steps, in a workdir on a shared file system. Each process writes and reads its own shards; the first
    process writes all other files. The newest `keep_last` checkpoints are kept, and in addition the `keep_best` with
    the best metric, the lowest ("min") or the highest ("max"). ValueError for other values.
    """

    def __init__(self, workdir: str | os.PathLike, *, keep_last: int = 2, keep_best: int = 1, best: str = "min"):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last must be at least 1 and keep_best at least 0, got {keep_last} and {keep_best}: "
                "a run needs its newest checkpoint to resume."
            )
        if best not in ("min", "max"):
            raise ValueError(f"best must be 'min' or 'max', got {best!r}.")
        self._root = _root(workdir)
        self._keep_last, self._keep_best, self._best = keep_last, keep_best, best
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future | None = None
        self._newest: int | None = None
        self._damaged: set[int] = set()  # damaged steps; they do not count towards keep_last

    @property
    def newest_step(self) -> int | None:
        """Step that this object last saved (or began to save) or restored; None before the first."""
        return self._newest

    def steps(self) -> list[int]:
        """Return the steps on disk with a valid manifest and correct file sizes, ascending. Files are not hashed."""
        return sorted(manifests.find_whole(self._root))

    def save(
        self, step: int, state: PyTree, *, data: Any = None, recipe: Any = None, metric: float | int | None = None
    ) -> bool:
        """Start to save a checkpoint; return as soon as the arrays are copied to the host.

        After the return, the arrays may be donated or modified. If an earlier save is in progress, the call waits for
        it first. If `step` is the step that was last saved or restored, only `data` (JSON values or bytes), `recipe`
        and `metric` are updated; the state on disk is unchanged. A metric of None or NaN is never the best; None keeps
        that of an existing checkpoint.

        Returns whether something was written: False if the checkpoint of this step already has these contents. Raises
        CheckpointSaveError if this save or an earlier one failed.
        """
        self.wait()
        step = int(step)
        leaves = arrays.flatten(state)
        items = dict([_named("data", data), _named("recipe", recipe)])
        metric = None if metric is None or not math.isfinite(metric) else float(metric)
        if step == self._newest:
            return processes.is_first() and self._amend(step, items, metric)
        if processes.is_first():
            self._make_way(step)
        copied = threading.Event()
        self._saving = self._thread.submit(self._write, step, leaves, items, metric, copied)
        self._newest = step
        copied.wait()
        if self._saving.done():  # already finished: if it failed, raise the error here
            self.wait()
        return True

    def wait(self) -> None:
        """Block until the save in progress is committed. Raises CheckpointSaveError if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.result()
            except BaseException:
                self._newest = None  # allow another attempt to save this step
                raise

    def close(self) -> None:
        """Wait for the save in progress, then stop the background thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def restore_newest(self, abstract_state: PyTree) -> Restored | None:
        """Restore the newest valid checkpoint, or None. Newer checkpoints that are damaged are skipped with a warning.

        The leaves of `abstract_state` decide the form of the arrays, as in `arrays.restore`. CheckpointError if all
        checkpoints are damaged, or lists all differences of the structure, shapes or dtypes from `abstract_state`.
        """
        self.wait()
        step = processes.first_decides(self._newest_valid)
        if step is None:
            return None
        directory = self._root / str(step)
        manifest = manifests.read_manifest(directory)
        self._newest = step
        return Restored(
            step=manifest["step"],
            state=_restore(directory, manifest, abstract_state),
            data=_item(directory, manifest, "data"),
            recipe=_item(directory, manifest, "recipe"),
            metric=manifest["metric"],
            path=str(directory),
        )

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except CheckpointSaveError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # report the first error, not this one

    def _newest_valid(self) -> int | None:
        found = manifests.newest_valid(self._root, self._damaged)
        return None if found is None else found[1]["step"]

    def _make_way(self, step: int) -> None:
        """Rename an existing directory of this step: damaged, foreign, or saved before an older step was restored."""
        final = self._root / str(step)
        if final.exists():
            aside = manifests.free_name(f"{final}.invalid")
            try:
                os.rename(final, aside)
            except OSError as error:
                raise _explain(error, final, {}) from error
            warnings.warn(f"{final} existed before this save; renamed it to {aside}.", CheckpointWarning, stacklevel=3)

    def _write(
        self,
        step: int,
        leaves: dict[arrays.LeafPath, Any],
        items: dict[str, bytes],
        metric: float | None,
        copied: threading.Event,
    ) -> None:
        temporary, final = self._root / f"{step}.tmp", self._root / str(step)
        first = processes.is_first()
        try:
            if first:
                self._clear()
                (temporary / "state").mkdir(parents=True)
            processes.barrier("checkpoint begun")
            finalize = arrays.save(temporary / "state", leaves, copied.set)
            processes.barrier("checkpoint written")
            if first:
                finalize()
                for name, content in items.items():
                    (temporary / name).write_bytes(content)
                facts = {"step": step, "metric": metric, "items": list(items), "state": arrays.describe(leaves)}
                manifests.write_manifest(temporary, facts)
                manifests.sync_tree(temporary)
                os.rename(temporary, final)
                manifests.sync(self._root)
            self._damaged.discard(step)
        except Exception as error:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise _explain(error, final, leaves) from error
        finally:
            copied.set()
        if first:
            # Only after the commit. Otherwise, if the process is killed in between, a run that never had a checkpoint
            # would look like a run that lost its checkpoints.
            try:
                manifests.record_first(self._root.parent, step)
            except OSError as error:
                raise CheckpointSaveError(
                    f"The checkpoint of step {step} was saved, but {error.filename} cannot be written: "
                    f"{error.strerror}. Free some space or make it writable, then rerun the command."
                ) from error
            self._delete_old(step)
        processes.barrier("checkpoint committed")

    def _clear(self) -> None:
        """Create the root, and remove unfinished saves of killed processes. Safe because a workdir has one writer."""
        if not self._root.is_dir():
            self._root.mkdir(parents=True, exist_ok=True)
            manifests.sync(self._root.parent)
        for path in self._root.glob("*.tmp"):
            if path.stem.isdecimal():  # other names are not unfinished checkpoints
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)

    def _amend(self, step: int, items: dict[str, bytes], metric: float | None) -> bool:
        """Atomically update metric and items of a saved checkpoint, for example after a late evaluation."""
        directory = self._root / str(step)
        manifest = manifests.read_manifest(directory)
        facts = {"metric": manifest["metric"] if metric is None else metric, "items": list(items)}
        if all(manifest[name] == value for name, value in facts.items()):
            return False
        new = [name for name in items if name not in manifest["files"]]
        try:
            for name in new:
                (directory / name).write_bytes(items[name])
                manifests.sync(directory / name)
            manifests.amend_manifest(directory, manifest, facts, new)
        except OSError as error:
            raise _explain(error, directory, {}) from error
        self._delete_old(step)
        return True

    def _delete_old(self, just_saved: int) -> None:
        found = manifests.find_whole(self._root).items()
        whole = {step: manifest for step, manifest in found if step not in self._damaged}
        best = manifests.ranked(whole, self._best)[: self._keep_best]
        for step in whole.keys() - {just_saved, *sorted(whole)[-self._keep_last :], *best}:
            doomed = self._root / f"{step}.tmp"  # rename first, so that a partly deleted directory never looks valid
            try:
                os.rename(self._root / str(step), doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                raise CheckpointSaveError(
                    f"The checkpoint of step {just_saved} was saved, but the old one at {self._root / str(step)} "
                    f"cannot be deleted: {error}. Make it deletable, then rerun the command."
                ) from error


def load_params(
    workdir: str | os.PathLike,
    *,
    step: int | Literal["newest", "best"] = "newest",
    names: str | Sequence[str] = "params",
    best: str = "min",
) -> tuple[PyTree, int]:
    """Load one field of a saved state, as nested dicts of jax.Arrays; return it and the step. The optimizer is not
    needed.

    `step` is a number, or "best": the step with the best metric. Of several `names`, the first one that was saved is
    loaded: `("ema", "params")`. The average `ema` is returned in the dtypes of `params`.

    Raises:
        FileNotFoundError: the workdir has no checkpoint, or none of this step.
        CheckpointError: the checkpoint is damaged, has none of these fields, or no checkpoint has a metric.
    """
    root = _root(workdir)
    steps = manifests.find_steps(root)
    if not steps:
        raise FileNotFoundError(f"No checkpoint in {root}. Train first, or pass the workdir of a run.")
    if step == "newest":
        found = manifests.newest_valid(root, set())
    else:
        candidates = manifests.ranked(manifests.find_whole(root), best) if step == "best" else [step]
        if not candidates:
            raise CheckpointError(
                f"No checkpoint in {root} has the metric that 'best' requires. Use 'newest' or a step: {steps}."
            )
        if candidates[0] not in steps:
            raise FileNotFoundError(
                f"No checkpoint of step {step} in {root}. Available steps: {', '.join(map(str, steps))}."
            )
        try:
            found = root / str(candidates[0]), manifests.verified(root / str(candidates[0]))
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Use another step. Available steps: {', '.join(map(str, steps))}."
            ) from error
    if found is None:  # a run in progress deleted it between `find_steps` and `newest_valid`
        raise FileNotFoundError(f"The checkpoints in {root} were deleted while they were read. Try again.")
    directory, manifest = found
    leaves = arrays.described(manifest["state"])
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        chosen = {path: leaf for path, leaf in leaves.items() if path[0] == name}
        if chosen:
            restored = arrays.restore(directory / "state", chosen)
            if name == "ema":  # stored in float32 if the parameters have fewer bits
                dtypes = {path[1:]: leaf.dtype for path, leaf in leaves.items() if path[0] == "params"}
                restored = {path: array.astype(dtypes.get(path[1:], array.dtype)) for path, array in restored.items()}
            return arrays.nest(restored)[name], manifest["step"]
    saved = sorted({path[0] for path in leaves})
    raise CheckpointError(f"{directory} has no field {' or '.join(names)}. Its fields: {', '.join(saved)}.")


def load_items(workdir: str | os.PathLike, step: int) -> tuple[Path, dict[str, str], dict[str, Any]]:
    """Load the data and the recipe of a checkpoint. Only file sizes are checked; `load_params` verifies all contents.

    Returns the directory, and the file names and the values of the items "data" and "recipe" (None: omitted).
    CheckpointError if a file is missing or has the wrong size.
    """
    directory = _root(workdir) / str(step)
    manifest = manifests.read_manifest(directory)
    manifests.check_sizes(directory, manifest)
    names = {file.partition("-")[0]: file for file in manifest["items"]}
    return directory, names, {name: _item(directory, manifest, name) for name in names}


def load_data(workdir: str | os.PathLike, step: int) -> Any:
    """Return the `data` that was saved with this step; None if it was omitted. Files are checked as in `load_items`."""
    return load_items(workdir, step)[2].get("data")


def _root(workdir: str | os.PathLike) -> Path:
    return Path(os.path.abspath(workdir)) / "checkpoints"


def _restore(directory: Path, manifest: dict[str, Any], abstract: PyTree) -> PyTree:
    wanted, saved = arrays.flatten(abstract), arrays.described(manifest["state"])
    if lines := arrays.differences(saved, wanted):
        listed = "\n  ".join(lines)
        raise CheckpointError(
            f"{directory} does not match this model and optimizer, {len(lines)} difference(s):\n  {listed}\n"
            "Use the recipe of this run, or another workdir."
        )
    restored = arrays.restore(directory / "state", wanted)
    return jax.tree.unflatten(jax.tree.structure(abstract), restored.values())


def _named(name: str, value: Any) -> tuple[str, bytes]:
    """Return file name and content of an item. The name has a hash of the content, so no update overwrites a file."""
    content = value if isinstance(value, bytes) else json.dumps(value, allow_nan=False).encode()
    suffix = ".bin" if isinstance(value, bytes) else ".json"
    return f"{name}-{hashlib.sha256(content).hexdigest()[:12]}{suffix}", content


def _item(directory: Path, manifest: dict[str, Any], name: str) -> Any:
    path = next(directory / file for file in manifest["items"] if file.startswith(name))
    return path.read_bytes() if path.suffix == ".bin" else json.loads(path.read_bytes())


# Messages of the operating system, because Orbax reports its errors as text.
_FULL = ("No space left on device", "File too large", "Disk quota exceeded")
_CLOSED = ("Read-only file system", "Permission denied", "Operation not permitted", "Not a directory", "File exists")


def _explain(error: Exception, path: Path, leaves: dict[arrays.LeafPath, Any]) -> CheckpointSaveError:
    """Return a one-line error for the long errors of Orbax and the operating system."""
    text = " ".join(str(error).split())
    if any(words in text for words in _FULL):
        size = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves.values())
        reason, do = "the disk is full", f"Free some space (one checkpoint takes {size / 1e6:,.1f} MB)"
    elif closed := [words for words in _CLOSED if words in text]:
        reason, do = f"it cannot be written ({closed[0]})", "Make it writable"
    else:
        reason, do = f"{type(error).__name__}: {text[:300]}", "Fix this"
    return CheckpointSaveError(
        f"No checkpoint was written to {path}: {reason}. Older checkpoints are intact. {do}, then rerun the command to "
        "resume from the newest checkpoint, or choose another workdir."
    )
