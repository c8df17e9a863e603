"""Metrics files, read."""

from __future__ import annotations

import os


def read_metrics(path: str | os.PathLike) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, each {"step": int, name: float, ...}; "NaN" and "Infinity" are floats again.

    A last line that was torn by a crash is left out. Raises FileNotFoundError, and ValueError naming any other bad line.
    """
