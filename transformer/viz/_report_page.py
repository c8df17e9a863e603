"""HTML report of one or several runs: one self-contained file that loads nothing from the network."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformer.config._local_paths import local_path
from transformer.config._replaced_files import replace_file
from transformer.viz._output_files import HTML_MARK, check_replaceable
from transformer.viz._page_parts import digest
from transformer.viz._report_curves import (
    CHARTS,
    LEFT,
    RIGHT,
    WIDTH,
    Chart,
    Line,
    escaped,
    frame_of,
    kept_points,
    last_value,
    lines_of,
    save_png,
    short,
    svg,
    unit_of,
)
from transformer.viz._style import COLORS

_LONG = re.compile(r"\S{13,}")
_JOINT = re.compile(r"(?<=[/_.,=:])(?=\w)")
MOST_SAMPLES = 50
"""maximum number of evaluations whose samples are shown: the first one, and the newest of the others"""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Report data of one run, as plain values. The page escapes all texts."""

    name: str
    """name of the run: the last part of its workdir"""
    status: str
    """progress of the run: running, finished, stopped"""
    facts: Mapping[str, str] = field(default_factory=dict)
    """short texts by name, such as the device and the number of parameters"""
    records: Sequence[Mapping[str, Any]] = ()
    """records of metrics.jsonl, as returned by `read_metrics`"""
    unit: str = "nats per token"
    """unit of the loss"""
    targets: str = "targets"
    """unit counted by the throughput"""
    outcome: str = ""
    """summary that the run printed at its end"""
    example: Sequence[tuple[str, bool]] = ()
    """parts of a training conversation, and whether they are trained"""
    samples: Sequence[tuple[int, str]] = ()
    """generated samples by step"""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """resolved recipe: values by dotted field name"""
    versions: Mapping[str, str] = field(default_factory=dict)
    """versions of the packages that the run used, by name"""
    calls: Sequence[str] = ()
    """one text per invocation of the training command"""
    commands: Mapping[str, str] = field(default_factory=dict)
    """commands that reproduce or use the run, by description"""


def report_page(runs: Sequence[RunReport], *, title: str, made: str = "") -> str:
    """Return an HTML page of one or several runs. Its content security policy forbids network access.

    Several runs share the plots, and the page lists the fields in which their recipes differ. `made` is the time and
    the command that created the page. A ValueError if there is no run, or two runs have the same name.
    """
    return _page(runs, charts_of(runs), title, made)


def _page(runs: Sequence[RunReport], charts: Sequence[tuple[Chart, list[Line]]], title: str, made: str) -> str:
    script = _part("report_page.js")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {digest(script)}; base-uri 'none'"
    body = [
        f"<h1>{breakable(title)}</h1>",
        f'<p class="quiet">{breakable(made)}</p>' * bool(made),
        _by_run(runs, "run", [{"status": run.status, **run.facts} for run in runs]),
        _curves(charts),
        _differences(runs),
        _last_values(runs),
        *(_texts(run, len(runs) > 1) for run in runs),
        _repeat(runs),
        _versions(runs),
        _recipes(runs),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"{HTML_MARK}\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{_part('report_page.css')}</style>\n<body>\n"
        + "\n".join(part for part in body if part)
        + f"\n<script>{script}</script>\n</body>\n</html>\n"
    )


def save_report(
    runs: Sequence[RunReport], html_path: str | os.PathLike, *, title: str, made: str = "", overwrite: bool = True
) -> list[Path]:
    """Write the page of `report_page`, and each plot as a PNG file in a directory next to it.

    For the page NAME.html, the directory is NAME_plots; its files are named by the plot, such as loss.png.

    Returns:
        The path of the page, then the paths of the PNG files.

    Raises:
        ValueError: see `report_page`.
        FileExistsError: without `overwrite`, a file exists that this package did not write.
    """
    path, charts = local_path(html_path, "html_path"), charts_of(runs)
    if not overwrite:
        check_replaceable([path, *(_picture(path, chart) for chart, _ in charts)])
    page = _page(runs, charts, title, made)
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [replace_file(path, page, errors="xmlcharrefreplace")]
    for chart, lines in charts:
        paths.append(_picture(path, chart))  # `save_png` creates the directory
        save_png(chart, lines, paths[-1])
    return paths


def _picture(page: Path, chart: Chart) -> Path:
    return page.with_name(f"{page.stem}_plots") / f"{chart.name}.png"


def charts_of(runs: Sequence[RunReport]) -> list[tuple[Chart, list[Line]]]:
    """Return the charts that have a finite value, with the units of the runs, and their lines, finite or not."""
    _check(runs)
    records, found = {run.name: run.records for run in runs}, []
    units = dict.fromkeys(run.unit for run in runs)
    counted = dict.fromkeys(run.targets for run in runs)
    for chart in CHARTS:
        if chart.name == "loss":
            chart = replace(chart, unit=" or ".join(units))
        elif chart.name == "speed":
            chart = replace(chart, unit=f"{' or '.join(counted)}/s")
        lines = lines_of(chart, records)
        if frame_of(chart, lines) is not None:
            found.append((chart, lines))
    return found


def _check(runs: Sequence[RunReport]) -> None:
    names = [run.name for run in runs]
    if not names:
        raise ValueError("there is no run to report: expected at least one. Pass runs=.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two runs are called {twice!r}: expected unique names. Rename one of them.")


def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """Return an HTML table; the cells are HTML."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = []
    for row in rows:
        first, *others = row
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _by_run(runs: Sequence[RunReport], what: str, values: Sequence[Mapping[str, Any]], missing: str = "") -> str:
    """Return a table with one row per name and one column per run."""
    names = dict.fromkeys(name for one in values for name in one)
    rows = [[breakable(name), *(breakable(one.get(name, missing)) for one in values)] for name in names]
    return _table([what, *(_name(runs, place) for place in range(len(runs)))], rows)


def _name(runs: Sequence[RunReport], place: int) -> str:
    key = f'<span class="key run{place % len(COLORS)}" aria-hidden="true">&#9632;</span> ' if len(runs) > 1 else ""
    return f"{key}{breakable(runs[place].name)}"


def _curves(charts: Sequence[tuple[Chart, list[Line]]]) -> str:
    if not charts:
        return (
            "<h2>Curves</h2><p>No metrics are logged yet; the first record is logged after --logging.every steps.</p>"
        )
    hint = "Point at a plot, or select it and use the arrow keys, to read its values."
    if any(line.dots for _, lines in charts for line in lines):
        hint += " Dashed lines with dots show held-out data."
    drawn = "".join(_figure(chart, lines, f"chart{place}") for place, (chart, lines) in enumerate(charts))
    return f'<h2>Curves</h2><p class="quiet">{hint}</p><div class="charts">{drawn}</div>'


def _figure(chart: Chart, lines: Sequence[Line], key: str) -> str:
    frame = frame_of(chart, lines)
    points = []
    for line in lines:
        kept = kept_points(line.values)
        values = [float(f"{line.values[place]:.6g}") for place in kept]
        points.append(
            {
                "label": line.label,
                "steps": [int(line.steps[place]) for place in kept],
                "values": [value if math.isfinite(value) else None for value in values],
            }
        )
    lost = [
        f"{line.label or chart.title} is not finite at {len(line.not_finite)} logged steps, first at step "
        f"{short(float(line.not_finite[0]))}"
        for line in lines
        if len(line.not_finite)
    ]
    unit = unit_of(chart, frame)
    unit = f" ({escaped(unit)})" if unit else ""
    return (
        f'<figure tabindex="0" data-right="{frame.right:g}" data-left="{LEFT}" data-width="{WIDTH - LEFT - RIGHT}">'
        f"<figcaption><b>{escaped(chart.title)}</b>{unit}{escaped(''.join(f'. {one}' for one in lost))}</figcaption>"
        f"{svg(chart, lines, key)}<output>{breakable('; '.join(map(last_value, lines)))}</output>"
        f'<script type="application/json">{_json(points)}</script></figure>'
    )


def breakable(value: object) -> str:
    """Escape a value as HTML text; long words may wrap after punctuation, by <wbr>, which is not copied."""
    return _LONG.sub(lambda found: _JOINT.sub("<wbr>", found[0]), escaped(value))


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script element: its texts can't end the element or start a comment."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")


def _differences(runs: Sequence[RunReport]) -> str:
    if len(runs) < 2:
        return ""
    names = dict.fromkeys(name for run in runs for name in run.recipe)
    different = [name for name in names if len({repr(run.recipe.get(name, name)) for run in runs}) > 1]
    values = [{name: _value(run.recipe[name]) for name in different if name in run.recipe} for run in runs]
    table = (
        _by_run(runs, "field", values, missing="not in this recipe")
        if different
        else "<p>None: the runs have the same recipe.</p>"
    )
    return f"<h2>Differences between the recipes</h2>{table}"


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _last_values(runs: Sequence[RunReport]) -> str:
    values: list[dict[str, str]] = []
    for run in runs:
        last: dict[str, tuple[int, Any]] = {}
        for record in run.records:
            last |= {name: (record["step"], value) for name, value in record.items() if name != "step"}
        values.append(
            {
                name: f"{short(float(value))} (step {step:,})"
                for name, (step, value) in sorted(last.items())
                if isinstance(value, int | float)
            }
        )
    return f"<h2>Last values</h2>{_by_run(runs, 'metric', values)}" if any(values) else ""


def _texts(run: RunReport, several: bool) -> str:
    parts = []
    of = f" of {breakable(run.name)}" if several else ""
    if run.outcome:
        opened = "" if several else " open"
        parts.append(f"<details{opened}><summary>Summary{of}</summary><pre>{breakable(run.outcome)}</pre></details>")
    if run.example:
        text = "".join(
            f"<mark>{breakable(part)}</mark>" if trained else breakable(part) for part, trained in run.example
        )
        parts.append(
            f"<details><summary>A training conversation{of}, with its trained parts marked</summary>"
            f"<pre>{text}</pre></details>"
        )
    shown = [*run.samples[:1], *run.samples[1:][-(MOST_SAMPLES - 1) :]]
    if shown:
        parts.append(f"<h2>Samples over time{of}</h2>")
    if len(shown) < len(run.samples):
        left = len(run.samples) - len(shown)
        parts.append(
            f'<p class="quiet">{left} of {len(run.samples)} are omitted; samples.txt contains all of them.</p>'
        )
    for place, (step, text) in enumerate(shown):
        opened = " open" if place == len(shown) - 1 else ""
        parts.append(
            f"<details{opened}><summary>step {step:,}</summary><pre>{breakable(text.rstrip())}</pre></details>"
        )
    return "\n".join(parts)


def _repeat(runs: Sequence[RunReport]) -> str:
    parts = []
    for place, run in enumerate(runs):
        parts.append(f"<h3>{_name(runs, place)}</h3>" * (len(runs) > 1))
        parts += [f"<p>{escaped(what)}</p><pre>{breakable(command)}</pre>" for what, command in run.commands.items()]
        if run.calls:
            calls = breakable("\n".join(run.calls))
            parts.append(f"<details><summary>Training commands: {len(run.calls)}</summary><pre>{calls}</pre></details>")
    return f"<h2>Reproduce and use</h2>{''.join(parts)}" if any(parts) else ""


def _versions(runs: Sequence[RunReport]) -> str:
    if not any(run.versions for run in runs):
        return ""
    return f"<h2>Versions</h2>{_by_run(runs, 'package', [run.versions for run in runs], missing='not recorded')}"


def _recipes(runs: Sequence[RunReport]) -> str:
    values = [{name: _value(value) for name, value in run.recipe.items()} for run in runs]
    if not any(values):
        return ""
    count = max(map(len, values))
    table = _by_run(runs, "field", values, missing="not in this recipe")
    return f"<h2>Recipe</h2><details><summary>All {count} fields of the resolved recipe</summary>{table}</details>"
