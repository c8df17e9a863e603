"""Text of docs/results.md, from the runs recorded by benchmarks.results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from transformer.config import ConfigError

FIGURES = {
    "bleu": ("BLEU", 2),
    "chrf": ("chrF", 2),
    "exact_match": ("exact match, %", 2),
    "basics": ("basics, %", 2),
    "prefers_chosen": ("chosen response more probable, %", 2),
    "reference_prefers_chosen": ("before training, %", 2),
    "accuracy": ("accuracy, %", 2),
    "mse": ("MSE", 3),
    "mae": ("MAE", 3),
    "loss": ("loss, nats", 3),
    "last_loss": ("final loss", 3),
}
"""metrics of runs: heading and number of decimals, in the order of the columns"""
NOT_RECORDED = "no run recorded yet"
DETAILS = ("last_loss", "basics")
"""metrics that only the table of the recipe shows, not the first table of the page"""

HEAD = """\
# Results

Results of models trained with this code. `python -m benchmarks.results` generates this page from the files in
[results/](results), and `python -m benchmarks.results add WORKDIR` adds a finished run to them. Do not edit this page.

All metrics are measured on held-out data. "Final loss" is the loss after the last step; all other metrics are measured
with the best checkpoint, which has the lowest loss or, for classifiers, the highest accuracy. If a line says "measured
on test", the checkpoint was selected on other data. ± is the standard deviation over runs with different seeds. Losses
are in nats per target (in Tiny Shakespeare, per character). Times are wall-clock times of complete runs, including
compilation, evaluation and report.
"""


def page(recipes: Mapping[str, Mapping[str, Any]], abouts: Mapping[str, str]) -> str:
    """Return the page: a table of all recipes, then one section per recipe.

    Args:
        recipes: content of docs/results/ by recipe. A recipe without runs and reason is shown as NOT_RECORDED.
        abouts: first line of the docstring of each recipe, by name.

    Raises:
        ConfigError: a file in docs/results/ belongs to no recipe.
    """
    for name in recipes:
        if name not in abouts:
            raise ConfigError(
                f"docs/results/{name}.json belongs to no recipe, because configs/{name}.py does not exist. Rename it."
            )
    recipes = {name: {"not_trained": NOT_RECORDED, "text": ""} | recipes.get(name, {}) for name in abouts}
    rows = [_row(name, recipes[name]) for name in abouts]
    table = ["| recipe | measured | published | parameters | steps | time per run |"]
    table += ["| --- | --- | --- | ---: | ---: | ---: |", *rows]
    return "\n".join([HEAD, *table, "", *(_section(name, recipes[name], abouts[name]) for name in abouts)])


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean and, for at least two values, the sample standard deviation: `1.605 ± 0.004`."""
    text = f"{mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {stdev(values):.{digits}f}"


def _row(name: str, content: Mapping[str, Any]) -> str:
    runs = content.get("runs", [])
    published = _published(content)
    if not runs:
        return f"| [{name}](#{name}) | not trained: {content['not_trained']} | {published} | | | |"
    known = [
        figure for figure in FIGURES if all(figure in run["figures"] for run in runs)
    ]  # so that the number of seeds holds for each metric
    first = [figure for figure in known if figure not in DETAILS] or known
    measured = [f"{FIGURES[figure][0]}: {_all(runs, figure)}" for figure in first]
    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else " (1 seed)"
    numbers = [_range([run[field] for run in runs]) for field in ("parameters", "steps")]
    time = _time([run["seconds"] for run in runs])
    return f"| [{name}](#{name}) | {'; '.join(measured)}{seeds} | {published} | {' | '.join(numbers)} | {time} |"


def _section(name: str, content: Mapping[str, Any], about: str) -> str:
    runs = content.get("runs", [])
    parts = [f"## {name}", about]
    if published := content.get("published"):
        parts.append(f"Published: {published['figure']}. Source: {published['source']}.")
    if runs:
        parts += ["\n".join(_table(runs)), "\n".join(_origins(runs))]
    else:
        parts.append(f"Not trained: {content['not_trained']}.")
    return "\n\n".join([*parts, *([content["text"]] if content["text"] else [])]) + "\n"


def _table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    figures = [figure for figure in FIGURES if any(figure in run["figures"] for run in runs)]
    groups = list(dict.fromkeys(group for run in runs for group in run.get("groups", {})))
    heads = ["seed", *(FIGURES[figure][0] for figure in figures), *groups, "parameters", "steps", "time"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " ---: |" * len(heads)]
    for run in runs:
        cells = [f"{run['seed']}"]
        cells += [_number(run["figures"], figure) for figure in figures]
        cells += [run.get("groups", {}).get(group, "") for group in groups]
        cells += [f"{run['parameters']:,}", f"{run['steps']:,}", _time([run["seconds"]])]
        lines.append("| " + " | ".join(cells) + " |")
    if len(runs) > 1:
        cells = ["all", *(_all(runs, figure) for figure in figures), *[""] * (len(groups) + 3)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _origins(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines with command, date, machine and versions of the runs. Runs that agree share a line."""
    seeds_by_line: dict[str, list[str]] = {}
    for run in runs:
        versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
        line = f"{run['date']}, {run['machine']}, {versions}"
        line += f"; measured on {run['split']}" if run.get("split") else ""
        for signature in run.get("signature", {}).values():
            line += f"; `{signature}`"
        line += f"; {run['note']}" if run.get("note") else ""
        seeds_by_line.setdefault(f"`{_without_seed(run)}`: {line}", []).append(str(run["seed"]))
    return [f"- seed {', '.join(seeds)}: {line}" for line, seeds in seeds_by_line.items()]


def _without_seed(run: Mapping[str, Any]) -> str:
    return run["command"].replace(f" --training.seed {run['seed']}", "")


def _published(content: Mapping[str, Any]) -> str:
    return content["published"]["figure"] if content.get("published") else ""


def _number(figures: Mapping[str, float], figure: str) -> str:
    return f"{figures[figure]:.{FIGURES[figure][1]}f}" if figure in figures else ""


def _all(runs: Sequence[Mapping[str, Any]], figure: str) -> str:
    return spread([run["figures"][figure] for run in runs if figure in run["figures"]], FIGURES[figure][1])


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _time(seconds: Sequence[float]) -> str:
    low, high = min(seconds), max(seconds)
    if high < 600:
        return f"{_range([round(low), round(high)])} s"
    if high < 7200:
        return f"{_range([round(low / 60), round(high / 60)])} min"
    low, high = f"{low / 3600:.1f}", f"{high / 3600:.1f}"
    return f"{low} h" if low == high else f"{low} to {high} h"
