"""`transformer-zoo study memory`: attention memory by sequence length, and padding of batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.cli._study import StudyCommand, Table, run, table_text


@dataclass(frozen=True, kw_only=True)
class Memory(StudyCommand):
    """Show the temporary memory of each attention kernel as a function of the sequence length, as reported by the
    compiler, and the fraction of padding for each batching strategy: padding, length buckets, packing.
    """

    output: Path = Path("study-memory.png")
    """PNG file to write"""
    lengths_of: Path | None = None
    """UTF-8 text file, one sequence per line, lengths in words; None: English number words, lengths in characters"""


def main(command: Memory) -> None:
    run("memory", _study, command)


def _study(command: Memory) -> tuple[dict[str, Any], str]:
    from transformer.viz._study_pictures import memory_picture
    from transformer.viz.studies._memory import HEAD_DIM, HEADS, memory_study
    from transformer.viz.studies._padding import BATCH_ROWS, number_word_lengths, padding_study, text_lengths

    if command.lengths_of is None:
        lengths, origin = number_word_lengths(), "English number words below a million, counted in characters"
    else:
        lengths, origin = text_lengths(command.lengths_of), f"lines of {command.lengths_of}, counted in words"
    padding = padding_study(lengths)
    rows = memory_study()
    names = dict.fromkeys(row.kernel for row in rows)
    kernels = {kernel: [row for row in rows if row.kernel == kernel] for kernel in names}
    measured = {kernel: [row.temporary_bytes for row in of_kernel] for kernel, of_kernel in kernels.items()}
    shares = {row.strategy: row.share for row in padding}
    memory_picture([row.length for row in next(iter(kernels.values()))], measured, shares, command.output)
    text = (
        f"Temporary memory of causal attention, forward and backward pass, without inputs and gradients: 1 sequence,\n"
        f"{HEADS} heads of size {HEAD_DIM}, float32, compiled for CPU but not run. Growth: per doubling of the "
        f"length.\n\n"
        f"{table_text(_memory_table(kernels))}\n\n"
        f"Padding of {len(lengths):,} sequences: {origin}\n"
        f"(mean length {lengths.mean():,.1f}, longest {lengths.max():,}). No batch has more positions than "
        f"{BATCH_ROWS} rows of the longest sequence.\n\n"
        f"{table_text(_padding_table(padding))}"
    )
    sequences = {"count": len(lengths), "mean": float(lengths.mean()), "longest": int(lengths.max())}
    return {
        "memory": [dataclasses.asdict(row) for row in rows],
        "lengths": {"of": origin, **sequences},
        "padding": [dataclasses.asdict(row) for row in padding],
    }, text


def _memory_table(kernels: Mapping[str, Sequence[Any]]) -> Table:
    """Return temporary memory and growth of each kernel by length, and the ratio of the first kernel to the others."""
    first, *others = kernels
    columns = [part for kernel in kernels for part in (f"{kernel} MiB", "growth")]
    table = [("length", *columns, *(f"{first} / {other}" for other in others))]
    for at_length in zip(*kernels.values(), strict=True):
        sizes = [row.temporary_bytes for row in at_length]
        cells = [c for row in at_length for c in (f"{row.temporary_bytes / 2**20:,.1f}", _times(row.growth))]
        table.append((f"{at_length[0].length:,}", *cells, *(f"{sizes[0] / size:,.1f}" for size in sizes[1:])))
    return table


def _padding_table(padding: Sequence[Any]) -> Table:
    """Return the padding of each batching strategy."""
    table = [("strategy", "batches", "rows", "positions", "padding", "share", "shapes")]
    for row in padding:
        counts = (f"{n:,}" for n in (row.batches, row.rows, row.places, row.padding))
        table.append((row.strategy, *counts, f"{row.share:.1%}", f"{row.shapes}"))
    return table


def _times(growth: float | None) -> str:
    return "" if growth is None else f"x {growth:.2f}"
