"""Metrics files, read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, each {"step": int, name: number, ...}; "NaN", "Infinity", "-Infinity" are floats.

    A last line that was torn by a crash is left out. Raises FileNotFoundError, and ValueError for another bad line.
    """
    return [record for _, record in metrics_lines(path)]


def metrics_lines(path: str | os.PathLike) -> Iterator[tuple[str, dict[str, Any]]]:
    """Like `read_metrics`, ValueError included, with the text of each line (without its end) beside what it says."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line, parse_constant=_refuse)
            good = isinstance(record, dict) and isinstance(record.get("step"), int)
        except ValueError:
            good = False
        if good:
            yield (
                line,
                {name: _WORDS.get(value, value) if isinstance(value, str) else value for name, value in record.items()},
            )
        elif number < len(lines):
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with a whole 'step', got {line[:60]!r}. "
                "Remove that line."
            )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
