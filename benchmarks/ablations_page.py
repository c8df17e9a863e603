"""Plots and tables of docs/without-attention.md, from the results stored by benchmarks.ablations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer.viz._curves import compare_losses

Results = Mapping[str, Any]
PAGE = "without-attention.md"
BOUNDS = {
    "learnt": "pair frequencies of the training text",
    "entropy": "bigram entropy of the held-out text: lower bound for models that see one character",
}


def write_page(results: Results, labels: Mapping[str, tuple[str, str]], docs: Path) -> None:
    """Draw the plots into `docs`/images, and write the tables between the markers of the page.

    Args:
        results: content of docs/ablations.json.
        labels: (table, label) of each run, by name.
        docs: directory of the documentation.
    """
    runs, bounds = results["runs"], {BOUNDS[name]: results["bounds"][name] for name in BOUNDS}
    entropy = {"bigram entropy": results["bounds"]["entropy"]}
    for picture, title, tables, shown in (
        ("without_attention", "Tiny Shakespeare, held-out loss", ("main",), bounds),
        ("ablations", "One part removed or changed, held-out loss", ("main", "parts"), entropy),
        ("norm_and_warmup", "Six layers, 500 steps, held-out loss", ("norm",), {}),
    ):
        curves = {label: runs[name]["eval"] for name, (table, label) in labels.items() if table in tables}
        if picture == "ablations":
            del curves[labels["no_attention"][1]]
        compare_losses(curves, docs / "images" / f"{picture}.png", bounds=shown, title=title)
    page = docs / PAGE
    page.write_text(filled(page.read_text(encoding="utf-8"), results, labels), encoding="utf-8")


def filled(text: str, results: Results, labels: Mapping[str, tuple[str, str]]) -> str:
    """Return the page with all its generated parts updated. Raises KeyError for an unknown marker name."""
    made = {table: _table(results, labels, table) for table in ("main", "blind", "parts", "norm")}
    made |= {"bounds": _bounds(results), "samples": _samples(results, labels), "when": _when(results)}
    return fill(text, made)


def fill(text: str, made: Mapping[str, str]) -> str:
    """Return the page with `made[NAME]` between `<!-- made: NAME -->` and `<!-- end -->`, for each marker.

    Raises:
        KeyError: `made` has no entry for the name of a marker.
    """

    def replace(match: re.Match) -> str:
        return f"<!-- made: {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- made: (\w+) -->\n.*?<!-- end -->", replace, text, flags=re.DOTALL)


def _table(results: Results, labels: Mapping[str, tuple[str, str]], table: str) -> str:
    entropy = results["bounds"]["entropy"]
    lines = [
        "| run | variant | parameters | steps | held-out loss | loss minus bigram entropy |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, (of, label) in labels.items():
        if of == table:
            run = results["runs"][name]
            size, loss = f"{run['parameters']:,} | {run['steps']:,}", run["eval_loss"]
            lines.append(f"| `{name}` | {label} | {size} | {loss:.3f} | {loss - entropy:+.3f} |")
    return "\n".join(lines)


def _bounds(results: Results) -> str:
    bounds = results["bounds"]
    rows = {
        "no input: entropy of single characters": bounds["unigram"],
        "current character, with the pair frequencies of the training text": bounds["learnt"],
        "current character, with the pair frequencies of the held-out text: its bigram entropy": bounds["entropy"],
    }
    lines = ["| input of the model | loss, nats per character |", "| --- | ---: |"]
    return "\n".join([*lines, *(f"| {name} | {value:.3f} |" for name, value in rows.items())])


def _samples(results: Results, labels: Mapping[str, tuple[str, str]]) -> str:
    parts = []
    for name in ("attention", "no_attention"):
        parts.append(f"{labels[name][1].capitalize()}:\n\n```text\n{results['runs'][name]['text'].rstrip()}\n```")
    return "\n\n".join(parts)


def _when(results: Results) -> str:
    minutes = sum(run["seconds"] for run in results["runs"].values()) / 60
    return f"Measured {results['made']}; {len(results['runs'])} runs, {minutes:.0f} minutes of training in total."
