"""The workdir of a run: checkpoints, lock, journal and provenance; open, resume, restart and average a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.training.workdir._runs import *  # noqa: F403

_EXPORTS = {"_runs": ("Run", "load_run")}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
