"""The workdir of a run: checkpoints, lock, journal and provenance; open, resume, restart and average a run."""

from transformer.config._lazy import lazy_exports

_EXPORTS = {"_runs": ("Run", "load_run")}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
