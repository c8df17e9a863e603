"""Checkpoints that are written whole or not at all, and read only when every byte is right.

`workdir/checkpoints/<step>/` holds `state/` (arrays, written by Orbax), the data iterator's state, the recipe and
`manifest.json`. All of it is written into `<step>.tmp`, hashed, forced to the disk, and renamed: that is the commit.
"""

from __future__ import annotations

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

from transformer.training import _arrays as arrays
from transformer.training import _processes as processes
from transformer.training._manifest import (
    CheckpointError,
    CheckpointWarning,
    amend_manifest,
    check_sizes,
    find_steps,
    find_whole,
    free_name,
    newest_valid,
    ranked,
    read_manifest,
    record_first,
    sync,
    sync_tree,
    verified,
    write_manifest,
)

__all__ = [
    *("CheckpointError", "CheckpointSaveError", "CheckpointWarning", "Checkpointer", "Restored"),
    *("load_data", "load_items", "load_params"),
]


class CheckpointSaveError(OSError):
    """A checkpoint that could not be written, found by the save itself or by the next `save`, `wait` or `close`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint held: its `step`, `state`, `data`, `recipe`, the `metric` it was saved with, and its `path`."""

    step: int
    state: Any  # in the structure of the abstract state
    data: Any  # what `save` was given as data (JSON values or bytes), None if nothing
    recipe: Any  # what `save` was given as recipe (JSON values), None if nothing
    metric: float | None
    path: str


class Checkpointer:
    """Writes `workdir/checkpoints/<step>/` in the background, keeps the last and the best, reads the newest valid one.

    Use it as a context manager, or call `close`. Of several processes all must save and restore at the same points:
    each writes and reads its parts of the arrays, the first one writes the rest, into a workdir that all can see.
    ValueError for a `best` that is neither "min" nor "max", or a `keep_last` below 1.
    """

    def __init__(self, workdir: str | os.PathLike, *, keep_last: int = 2, keep_best: int = 1, best: str = "min"):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last must be at least 1 and keep_best at least 0, got {keep_last} and {keep_best}: "
                "without the newest checkpoint no run can go on."
            )
        if best not in ("min", "max"):
            raise ValueError(f"best must be 'min' or 'max', got {best!r}.")
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
        return sorted(find_whole(self._root))

    def save(
        self, step: int, state: PyTree, *, data: Any = None, recipe: Any = None, metric: float | int | None = None
    ) -> bool:
        """Starts to save and returns once the arrays are copied to the host (they may be donated or changed then).

        Waits first for a save still in progress. `data` is the data iterator's state (JSON values or bytes), `recipe`
        JSON values, `metric` what "best" is judged by (None and NaN are never best). When this step was the last one
        saved or restored, its state stays as it is and the rest is brought up to date (a metric of None keeps the old
        one); False if that says the same. Raises CheckpointSaveError if an earlier save or this one failed.
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
        step = processes.first_decides(self._newest_valid)
        if step is None:
            return None
        directory = self._root / str(step)
        manifest = read_manifest(directory)
        self._newest = step
        return Restored(
            step=manifest["step"],
            state=_restore(directory, manifest, abstract_state),
            data=_item(directory, manifest, "data"),
            recipe=_item(directory, manifest, "recipe"),
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

    def _newest_valid(self) -> int | None:
        found = newest_valid(self._root, self._damaged)
        return None if found is None else found[1]["step"]

    def _make_way(self, step: int) -> None:
        """What stands where this step goes (damaged, foreign, or of a run gone back) is kept under another name."""
        final = self._root / str(step)
        if final.exists():
            aside = free_name(f"{final}.invalid")
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
                write_manifest(temporary, facts)
                sync_tree(temporary)
                os.rename(temporary, final)
                sync(self._root)
            self._damaged.discard(step)
        except Exception as error:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise _explain(error, final, leaves) from error
        finally:
            copied.set()
        if first:
            # Not before the commit: a kill in between would make a run without a checkpoint look like one that lost it.
            try:
                record_first(self._root.parent, step)
            except OSError as error:
                raise CheckpointSaveError(
                    f"The checkpoint of step {step} is written, but {error.filename} cannot be: {error.strerror}. Make "
                    "room, or make it writable, and run the same command again."
                ) from error
            self._delete_old(step)
        processes.barrier("checkpoint committed")

    def _clear(self) -> None:
        """Makes the root, and removes what a process left over that was killed: there is one writer."""
        if not self._root.is_dir():
            self._root.mkdir(parents=True, exist_ok=True)
            sync(self._root.parent)
        for path in self._root.glob("*.tmp"):
            if path.stem.isdecimal():  # others are not ours
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)

    def _amend(self, step: int, items: dict[str, bytes], metric: float | None) -> bool:
        """The arrays stay; a metric and items known only now (an evaluation made up for, say) are added atomically."""
        directory = self._root / str(step)
        manifest = read_manifest(directory)
        facts = {"metric": manifest["metric"] if metric is None else metric, "items": list(items)}
        if all(manifest[name] == value for name, value in facts.items()):
            return False
        new = [name for name in items if name not in manifest["files"]]
        try:
            for name in new:
                (directory / name).write_bytes(items[name])
                sync(directory / name)
            amend_manifest(directory, manifest, facts, new)
        except OSError as error:
            raise _explain(error, directory, {}) from error
        self._delete_old(step)
        return True

    def _delete_old(self, just_saved: int) -> None:
        manifests = {step: manifest for step, manifest in find_whole(self._root).items() if step not in self._damaged}
        keep = {just_saved, *sorted(manifests)[-self._keep_last :], *ranked(manifests, self._best)[: self._keep_best]}
        for step in manifests.keys() - keep:
            doomed = self._root / f"{step}.tmp"  # renamed first: half deleted it must not look like a checkpoint
            try:
                os.rename(self._root / str(step), doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                raise CheckpointSaveError(
                    f"The checkpoint of step {just_saved} is written, but the old one at {self._root / str(step)} "
                    f"cannot be deleted: {error}. Make it deletable and run the same command again."
                ) from error


def load_params(
    workdir: str | os.PathLike,
    *,
    step: int | Literal["newest", "best"] = "newest",
    names: str | Sequence[str] = "params",
    best: str = "min",
) -> tuple[PyTree, int]:
    """One field of a saved state as nested dicts of jax.Arrays, and its step; the optimizer need not be known.

    `names` is a field of the state, or several: the first that was saved is taken (`("ema", "params")`).
    Raises FileNotFoundError when the workdir has no checkpoint (or not that one), CheckpointError when it is not valid.
    """
    root = _root(workdir)
    steps = find_steps(root)
    if not steps:
        raise FileNotFoundError(f"No checkpoint in {root}. Train first, or give the workdir of a run.")
    if step == "newest":
        found = newest_valid(root, set())
    else:
        candidates = ranked(find_whole(root), best) if step == "best" else [step]
        if not candidates:
            raise CheckpointError(
                f"No checkpoint in {root} carries the metric that 'best' needs. Use 'newest' or a step: {steps}."
            )
        if candidates[0] not in steps:
            raise FileNotFoundError(f"No checkpoint of step {step} in {root}. There are: {', '.join(map(str, steps))}.")
        try:
            found = root / str(candidates[0]), verified(root / str(candidates[0]))
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Take another step; there are: {', '.join(map(str, steps))}.") from error
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


def load_items(workdir: str | os.PathLike, step: int) -> tuple[Path, dict[str, str], dict[str, Any]]:
    """Directory of a checkpoint, and file names and values of what `save` was given beside the state: "data" and
    "recipe", None if nothing. Of the files only the sizes are checked, with a CheckpointError: `load_params` verifies
    all of them.
    """
    directory = _root(workdir) / str(step)
    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    names = {file.partition("-")[0]: file for file in manifest["items"]}
    return directory, names, {name: _item(directory, manifest, name) for name in names}


def load_data(workdir: str | os.PathLike, step: int) -> Any:
    """What `save` was given as data with this step, None if nothing; as `load_items`."""
    return load_items(workdir, step)[2].get("data")


def _root(workdir: str | os.PathLike) -> Path:
    return Path(os.path.abspath(workdir)) / "checkpoints"


def _restore(directory: Path, manifest: dict[str, Any], abstract: PyTree) -> PyTree:
    wanted, saved = arrays.flatten(abstract), arrays.described(manifest["state"])
    if lines := arrays.differences(saved, wanted):
        listed = "\n  ".join(lines)
        raise CheckpointError(
            f"{directory} does not fit this model and optimizer, {len(lines)} difference(s):\n  {listed}\n"
            "Use the recipe that it was trained with, or another workdir."
        )
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays.restore(directory / "state", wanted).values())


def _named(name: str, value: Any) -> tuple[str, bytes]:
    """File name and content of an item; the name depends on the content, so that a new one never overwrites an old."""
    content = value if isinstance(value, bytes) else json.dumps(value, allow_nan=False).encode()
    suffix = ".bin" if isinstance(value, bytes) else ".json"
    return f"{name}-{hashlib.sha256(content).hexdigest()[:12]}{suffix}", content


def _item(directory: Path, manifest: dict[str, Any], name: str) -> Any:
    path = next(directory / file for file in manifest["items"] if file.startswith(name))
    return path.read_bytes() if path.suffix == ".bin" else json.loads(path.read_bytes())


# In the words of the system: Orbax hands on its errors as text.
_FULL = ("No space left on device", "File too large", "Disk quota exceeded")
_CLOSED = ("Read-only file system", "Permission denied", "Operation not permitted", "Not a directory", "File exists")


def _explain(error: Exception, path: Path, leaves: dict[arrays.LeafPath, Any]) -> CheckpointSaveError:
    """Says in one line what Orbax and the system say in many."""
    text = " ".join(str(error).split())
    if any(words in text for words in _FULL):
        size = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves.values())
        reason, do = "the disk is full", f"Free some space (one checkpoint takes {size / 1e6:,.1f} MB)"
    elif closed := [words for words in _CLOSED if words in text]:
        reason, do = f"it cannot be written ({closed[0]})", "Make it writable"
    else:
        reason, do = f"{type(error).__name__}: {text[:300]}", "Mend that"
    return CheckpointSaveError(
        f"No checkpoint written to {path}: {reason}. Older checkpoints are intact. {do} and run the same command again "
        "to go on from the newest, or choose another workdir."
    )
