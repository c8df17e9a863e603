"""Checkpoints that are written whole or not at all, and read only when every byte is right."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import PyTree


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: damaged, foreign, or of another model. The message says which and what to do."""


class CheckpointSaveError(OSError):
    """A checkpoint that could not be written, found by the save itself or by the next `save`, `wait` or `close`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint held."""

    step: int
    state: Any  # the pytree, arrays in the structure of the abstract state
    data: Any  # what `save` was given as data (JSON values or bytes), None if nothing
    recipe: Any  # what `save` was given as recipe (JSON values), None if nothing
    metric: float | None
    path: str


class Checkpointer:
    """Writes `workdir/checkpoints/<step>/` in the background, keeps the newest and the best, reads the newest valid one.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self, workdir: str | os.PathLike, *, keep_last: int = 2, keep_best: int = 1, best: Literal["min", "max"] = "min"
    ): ...

    @property
    def newest_step(self) -> int | None:
        """The step saved (or being saved, or restored) last by this object, None before any."""

    def steps(self) -> list[int]:
        """Steps that are on disk and look whole (manifest there, sizes right), ascending."""

    def save(self, step: int, state: PyTree, *, data: Any = None, recipe: Any = None, metric: float | None = None) -> bool:
        """Starts to save and returns once the arrays are copied to the host (they may be donated or changed then).

        Waits first for a save still in progress. `data` is the data iterator's state (JSON values or bytes), `recipe`
        JSON values, `metric` what "best" is judged by (None or NaN is never best). Returns False, and writes nothing,
        when this step is saved already. Raises CheckpointSaveError if an earlier or this save failed.
        """

    def wait(self) -> None:
        """Blocks until the save in progress is committed. Raises CheckpointSaveError if it failed."""

    def close(self) -> None:
        """`wait`, and ends the background thread."""

    def restore_newest(self, abstract_state: PyTree) -> Restored | None:
        """The newest valid checkpoint, None when there is none at all.

        `abstract_state` has `jax.ShapeDtypeStruct`s (or arrays) as leaves: one with a sharding is restored as a jax.Array
        laid out so, one without as a jax.Array on the default device, a NumPy array as a NumPy array. Newer checkpoints
        that are damaged are passed over with a warning that names the bad file. Raises CheckpointError when there are
        checkpoints but no valid one, and when structure, shapes or dtypes differ (all of them in one message).
        """

    def restore(self, step: int, abstract_state: PyTree) -> Restored:
        """The checkpoint of that very step, or CheckpointError."""

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def newest_recipe(workdir: str | os.PathLike) -> Any | None:
    """The recipe (JSON values) in the newest valid checkpoint, None when there is no checkpoint."""


def load_params(
    workdir: str | os.PathLike,
    *,
    step: int | Literal["newest", "best"] = "newest",
    names: str | Sequence[str] = "params",
    best: Literal["min", "max"] = "min",
) -> tuple[PyTree, int]:
    """One field of a saved state, as nested dicts of jax.Arrays, and its step; the optimizer need not be known.

    `names` is a field of the state, or several: the first that was saved is taken (`("ema", "params")`).
    Raises FileNotFoundError when the workdir has no checkpoint, CheckpointError when it has no valid one, or not that one.
    """
