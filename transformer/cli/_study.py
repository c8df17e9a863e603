"""`python -m transformer inspect --scale | --positions | --memory`: measure a formula, as a table and a plot."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from transformer.cli import _inspect_text as inspect_attention
from transformer.cli._arguments import parse
from transformer.config._checks import ConfigError, nearest
from transformer.config._invocation import program
from transformer.viz._output_files import check_replaceable

Table = Sequence[Sequence[str]]
"""rows of cells; the first row contains the column names"""


@dataclass(frozen=True, kw_only=True)
class StudyCommand:
    """Options of every study. A study does not load a model."""

    output: Path
    """PNG file to write"""
    overwrite: bool = False
    """replace a file at --output that this program did not write"""
    json: bool = False
    """print one JSON object"""
    debug: bool = False
    """show the traceback of an error"""


@dataclass(frozen=True, kw_only=True)
class Scale(StudyCommand):
    """Show why attention scores are divided by sqrt(d_k): their variance and the gradient of the softmax, with and
    without the division. Queries and keys have independent N(0, 1) entries; each softmax is over 64 keys (Vaswani et
    al. 2017, section 3.2.1).
    """

    output: Path = Path("inspect-scale.png")
    """PNG file to write"""


@dataclass(frozen=True, kw_only=True)
class Positions(StudyCommand):
    """Show the similarity of two positions as a function of their distance, up to 100,000, for each position scheme,
    and where sinusoids repeat, so that a distant position has almost the same encoding (Vaswani et al. 2017, section
    3.5).
    """

    output: Path = Path("inspect-positions.png")
    """PNG file to write"""


@dataclass(frozen=True, kw_only=True)
class Memory(StudyCommand):
    """Show the temporary memory of each attention kernel as a function of the sequence length, as reported by the
    compiler, and the fraction of padding for each batching strategy: padding, length buckets, packing.
    """

    output: Path = Path("inspect-memory.png")
    """PNG file to write"""
    lengths_of: Path | None = None
    """UTF-8 text file, one sequence per line, lengths in words; None: English number words, lengths in characters"""


def _scale(command: Scale) -> tuple[dict[str, Any], str]:
    from transformer.viz._study_pictures import scale_picture
    from transformer.viz.studies._scale import scale_study

    rows = scale_study()
    variants = {"q·k": False, "q·k / sqrt(d_k)": True}
    sizes = [row.d_k for row in rows if row.scaled]
    variances = {label: [row.variance for row in rows if row.scaled == scaled] for label, scaled in variants.items()}
    gradients = {label: [row.gradient for row in rows if row.scaled == scaled] for label, scaled in variants.items()}
    scale_picture(sizes, variances, gradients, command.output)
    table = [("d_k", "scale", "mean", "variance", "largest weight", "gradient")]
    for row in rows:
        scale = f"1/{row.d_k**0.5:g}" if row.scaled else "1"
        numbers = (f"{row.mean:z.2f}", f"{row.variance:,.2f}", f"{row.largest_weight:.3f}", f"{row.gradient:.3f}")
        table.append((f"{row.d_k:,}", scale, *numbers))
    text = (
        "Mean and variance of the scores, scale x q.k with N(0, 1) entries. Softmax over 64 scores: largest weight, "
        "and\n"
        "Frobenius norm of the Jacobian, as means over the queries.\n\n"
    )
    return {"rows": _plain(rows)}, text + _text(table)


def _positions(command: Positions) -> tuple[dict[str, Any], str]:
    from transformer.viz._study_pictures import positions_picture
    from transformer.viz.studies._positions import ALIKE, LATE, position_study

    study = position_study()

    def chosen(*parts: str) -> dict[str, Any]:
        return {name: curve for name, curve in study.curves.items() if any(part in name for part in parts)}

    stretched = chosen("x 8")
    panels = {
        "Sinusoids: mean and range around a distance": {
            name: curve for name, curve in chosen("sinusoidal", "rotary").items() if name not in stretched
        },
        "Rotary, stretched to 8 times the length: mean and range": stretched,
        "ALiBi: factor on the attention weight": chosen("ALiBi"),
    }
    positions_picture(
        panels, {width: study.width_curves[width] for width in (8, 16, 32, 64, 512)}, ALIKE, command.output
    )
    similarities = [("similarity at distance", *(f"{distance:,}" for distance in study.distances))]
    similarities += [(row.scheme, *(f"{value:.3f}" for value in row.similarity)) for row in study.similarities]
    codes = [("scheme", "distinct", "unique below", "shared from")]
    codes += [(row.scheme, f"{row.codes:,}", f"{row.single_below:,}", f"{row.alike_from:,}") for row in study.codes]
    repeats = [
        ("width", "shortest wave", "longest wave", f"returns to {ALIKE}", f"maximum from {LATE:,}", "at distance")
    ]
    repeats += [
        (
            f"{row.features}",
            f"{row.shortest_wavelength:,.2f}",
            f"{row.longest_wavelength:,.0f}",
            "never" if row.returns_at is None else f"{row.returns_at:,}",
            f"{row.highest:.3f}",
            f"{row.highest_at:,}",
        )
        for row in study.repeats
    ]
    text = (
        "Similarity of two positions: cosine of their encodings (sinusoidal), normalized score of an equal query and\n"
        "key (rotary, none), factor on the attention weight (ALiBi). It depends only on the distance.\n\n"
        f"{_text(similarities)}\n\n"
        "Schemes that assign an index to each distance (learned: to each position): number of distinct indices,\n"
        "distance below which each index is unique, and distance from which all share one index or have none.\n\n"
        f"{_text(codes)}\n\n"
        f"Where sinusoids with base 10,000 repeat, by width (d_model; rotary: head size): wavelengths, the first\n"
        f"distance after the first minimum with a similarity of at least {ALIKE}, and the maximum similarity.\n\n"
        f"{_text(repeats)}"
    )
    values = {name: _plain(getattr(study, name)) for name in ("similarities", "codes", "repeats")}
    return {"distances": list(study.distances), **values}, text


def _memory(command: Memory) -> tuple[dict[str, Any], str]:
    from transformer.viz._study_pictures import memory_picture
    from transformer.viz.studies._memory import HEAD_DIM, HEADS, memory_study
    from transformer.viz.studies._padding import BATCH_ROWS, number_word_lengths, padding_study, text_lengths

    if command.lengths_of is None:
        lengths, origin = (
            number_word_lengths(),
            "English number words below a million, counted in characters",
        )
    else:
        lengths, origin = text_lengths(command.lengths_of), f"lines of {command.lengths_of}, counted in words"
    padding = padding_study(lengths)
    rows = memory_study()
    kernels = {
        kernel: [row for row in rows if row.kernel == kernel] for kernel in dict.fromkeys(r.kernel for r in rows)
    }
    memory_picture(
        [row.length for row in next(iter(kernels.values()))],
        {kernel: [row.temporary_bytes for row in of_kernel] for kernel, of_kernel in kernels.items()},
        {row.strategy: row.share for row in padding},
        command.output,
    )
    text = (
        f"Temporary memory of causal attention, forward and backward pass, without inputs and gradients: 1 sequence,\n"
        f"{HEADS} heads of size {HEAD_DIM}, float32, compiled for CPU but not run. Growth: per doubling of the "
        f"length.\n\n"
        f"{_text(_memory_table(kernels))}\n\n"
        f"Padding of {len(lengths):,} sequences: {origin}\n"
        f"(mean length {lengths.mean():,.1f}, longest {lengths.max():,}). No batch has more positions than "
        f"{BATCH_ROWS} rows of the longest sequence.\n\n"
        f"{_text(_padding_table(padding))}"
    )
    sequences = {"count": len(lengths), "mean": float(lengths.mean()), "longest": int(lengths.max())}
    return {"memory": _plain(rows), "lengths": {"of": origin, **sequences}, "padding": _plain(padding)}, text


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


@dataclass(frozen=True)
class Study:
    """A study: its options, its function, and its line in --help."""

    command: type[StudyCommand]
    """options"""
    run: Callable[[Any], tuple[dict[str, Any], str]]
    """draws the plot; returns the JSON values and the text to print"""
    help: str
    """line in --help"""


STUDIES = {
    "--scale": Study(Scale, _scale, "why scores are divided by sqrt(d_k)"),
    "--positions": Study(Positions, _positions, "similarity of positions by distance, for each position scheme"),
    "--memory": Study(Memory, _memory, "memory of attention by length, and padding of batches"),
}
"""studies by their flag"""


def main(arguments: Sequence[str]) -> None:
    """Run a study and print its table and the path of its plot; without a study flag, draw attention maps."""
    asked = [flag for flag in STUDIES if flag in arguments]
    if not asked:
        if {"-h", "--help"} & set(arguments):
            _print_both_uses()
        _check_no_flag_was_meant(arguments)
        inspect_attention.main(arguments)
        return
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} can't be used together. Pass one of them.")
    (flag,) = asked
    study = STUDIES[flag]
    words = [word for word in arguments if word != flag]
    _check_words(flag, words)
    command = parse(study.command, f"inspect {flag}", words)
    if not command.overwrite:
        check_replaceable([command.output])
    values, text = study.run(command)
    if command.json:
        print(json.dumps({"study": flag.removeprefix("--"), **values, "picture": str(command.output)}, indent=2))
    else:
        print(f"{text}\n\n{command.output}")


def _print_both_uses() -> NoReturn:
    """Print the --help text for both uses: attention maps of a model, and studies."""
    with contextlib.suppress(SystemExit):
        parse(inspect_attention.Inspect, "inspect", ["--help"])
    width = max(map(len, STUDIES))
    studies = "\n".join(f"  {flag:{width}}  {study.help}" for flag, study in STUDIES.items())
    print(
        f"\nusage: {program('inspect')} STUDY [OPTIONS]\n\n"
        "A study evaluates a formula and needs no DIR; it prints a table (or --json) and writes a plot (--output).\n\n"
        f"{studies}\n\n"
        f"{program('inspect')} STUDY --help describes a study and its options."
    )
    raise SystemExit(0)


def _options(command: type) -> dict[str, bool]:
    """Return the options of a command, and whether each takes a value."""
    fields = dataclasses.fields(command)
    return {f"--{field.name.replace('_', '-')}": field.type not in (bool, "bool") for field in fields}


def _named(word: str) -> str:
    return word.split("=", 1)[0].replace("_", "-")


def _check_no_flag_was_meant(words: Sequence[str]) -> None:
    """Raise ConfigError for a misspelled option that is closer to a study flag than to an option for DIR."""
    known = [*_options(inspect_attention.Inspect), "--help"]
    for option in map(_named, words):
        if option in STUDIES:
            raise ConfigError(f"{option} takes no value. Remove the value.")
        if option.startswith("--") and option not in known:
            hint = nearest(option, [*known, *STUDIES])
            if hint != nearest(option, known):
                raise ConfigError(f"inspect has no option {option}.{hint} --help lists all options.")


def _check_words(flag: str, words: Sequence[str]) -> None:
    """Raise ConfigError for an argument that this study does not accept."""
    known = _options(STUDIES[flag].command)
    alone = f"{flag} does not load a model, got {{}}. Remove it, or remove {flag} to draw attention maps of a model."
    for before, word in itertools.pairwise(["", *words]):
        option = _named(word)
        if not word.startswith("-"):
            if not known.get(_named(before), False) or "=" in before:
                raise ConfigError(alone.format(word))
        elif option in STUDIES:
            raise ConfigError(f"{option} takes no value. Remove the value.")
        elif option.startswith("--") and option not in (*known, "--help"):
            if option in _options(inspect_attention.Inspect):
                raise ConfigError(alone.format(option))
            for other, study in STUDIES.items():
                if option in _options(study.command):
                    raise ConfigError(
                        f"{option} is an option of {other}, not of {flag}. Remove it, or pass {other} instead of "
                        f"{flag}."
                    )
            hint = nearest(option, [*known, *STUDIES, "--help"])
            raise ConfigError(f"inspect {flag} has no option {option}.{hint} --help lists all options.")


def _plain(rows: Iterable[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def _times(growth: float | None) -> str:
    return "" if growth is None else f"x {growth:.2f}"


def _text(table: Table) -> str:
    """Format a table with aligned columns: the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *others in table:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
