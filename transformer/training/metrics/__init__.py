"""Metrics of a run: their files and trackers, speed, samples, and the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.training.metrics._summary import *  # noqa: F403

_EXPORTS = {"_summary": ("Summary",)}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
