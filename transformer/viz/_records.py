"""Read metrics files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from transformer.config._local_paths import local_path

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl file, each {"step": int, name: number, ...}.

    The strings "NaN", "Infinity" and "-Infinity" become floats. A last line that a crash truncated is ignored.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: any other line is invalid.
    """
    return [record for _, record in metrics_lines(path)]


def metrics_lines(path: str | os.PathLike) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line, without its line end, and its record. Raises the errors of `read_metrics`."""
    lines = local_path(path, "path").read_text(encoding="utf-8", errors="replace").splitlines()
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
                f"{path}, line {number}: expected a JSON object with an integer 'step', got {line[:60]!r}. "
                "Remove this line."
            )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")
