"""Metrics of a run: their files and trackers, speed, samples, and the summary."""

from transformer.config._lazy import lazy_exports

_EXPORTS = {"_summary": ("Summary",)}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
