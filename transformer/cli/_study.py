"""Options and output of the studies: each measures a formula, and prints it as a table and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.cli._arguments import Command
from transformer.viz._output_files import check_replaceable

Table = Sequence[Sequence[str]]
"""rows of cells; the first row contains the column names"""


@dataclass(frozen=True, kw_only=True)
class StudyCommand(Command):
    """Options of every study. A study does not load a model."""

    output: Path
    """PNG file to write"""
    overwrite: bool = False
    """replace a file at --output that this program did not write"""


def run(name: str, study: Callable[[Any], tuple[dict[str, Any], str]], command: StudyCommand) -> None:
    """Print the tables of a study and the path of its plot. `study` draws it, and returns JSON values and the text."""
    if not command.overwrite:
        check_replaceable([command.output])
    values, text = study(command)
    picture = str(command.output)
    command.answer([f"{text}\n\n{picture}"], {"study": name, **values, "picture": picture})


def table_text(table: Table) -> str:
    """Format a table with aligned columns: the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *others in table:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
