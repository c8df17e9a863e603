"""Results in docs/results.md: record finished runs, and generate the page.

Usage: python -m benchmarks.results                        regenerates docs/results.md
       python -m benchmarks.results add WORKDIR ...        first records finished runs, each in the file of its recipe

The results are read from recipe.json, summary.json and metrics.jsonl of a workdir, and stored in
docs/results/RECIPE.json with one entry per run; a run replaces an earlier run with the same command. Machine and
versions are those of the machine on which `add` runs: run it where the training ran, or pass --machine. In addition to
`runs`, the file may contain fields that are edited by hand: `published`, a published result with its source, and
`not_trained`, the reason why there is no run. If docs/results/RECIPE.md exists, its text follows the table of the
recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.results_page import FIGURES, page
from transformer.config import ConfigError
from transformer.data.kinds import PLACES
from transformer.training import Recipe, difference, find_recipe, load_recipe, load_recipe_file
from transformer.training._serial import flatten
from transformer.training._start import RECIPE_FIELDS
from transformer.viz import read_metrics

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
CURVE = 40
"""maximum number of points of a stored curve"""
SHOWN_FIELDS = ("training.steps", *(f"data.{field}" for field in sorted(PLACES - {"data_dir", "manual_dir"})))
"""fields that a recorded command shows, although a run can be resumed with other values"""
FILLED_IN = (
    *("model.vocab_size", "model.embedding.source_vocab_size", "model.output.num_classes", "origin"),
    "model.input.token_id",
    *("data.labels", "data.columns", "data.mean", "data.std", "data.processor"),
)
"""fields that training fills in, so that a command does not show them"""


def record(workdir: str | os.PathLike, where: str, note: str = "") -> tuple[str, dict[str, Any]]:
    """Return the name of the recipe, and the entry to store for a finished run.

    Args:
        workdir: workdir of the run.
        where: description of the machine that the run was trained on.
        note: remark on the run.

    Raises:
        ConfigError: `workdir` does not contain a finished run, or configs/ has no recipe with its name.
    """
    workdir = Path(workdir)
    recipe = load_recipe(workdir)
    try:
        summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{workdir / 'summary.json'} can't be read ({error}). Finish the run first.") from error
    if summary["step"] < summary["steps"]:
        raise ConfigError(
            f"{workdir} has trained only {summary['step']} of {summary['steps']} steps. Finish the run first."
        )
    evaluated = [line for line in read_metrics(workdir / "metrics.jsonl") if "eval/loss" in line]
    run = {
        "seed": recipe.training.seed,
        "figures": figures(recipe.task, summary, evaluated),
        "parameters": summary["parameters"],
        "steps": summary["step"],
        "best_step": summary["best_step"],
        "seconds": round(summary["seconds"]),
        "date": date.fromtimestamp((workdir / "summary.json").stat().st_mtime).isoformat(),
        "machine": where,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("jax", "flax")},
        "command": command(recipe),
        "curve": curve(evaluated),
    }
    if summary.get("split"):
        run["split"] = summary["split"]
    if baseline := summary.get("baseline"):
        run["groups"] = {"repeating the last step": f"MSE {baseline['loss']:.3f}, MAE {baseline['mae']:.3f}"}
    groups = {group: score for group, score in (summary.get("exact_match") or {}).items() if group}
    if groups:
        name = summary["group_name"]
        run["groups"] = {f"{name} {group}": f"{score['right']} / {score['total']}" for group, score in groups.items()}
    if summary.get("corpus"):
        run["signature"] = {key: text for key, text in summary["corpus"].items() if isinstance(text, str)}
    return recipe.name, run | ({"note": note} if note else {})


def figures(task: str, summary: Mapping[str, Any], evaluated: list[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a run by the names in `FIGURES`: losses in nats, fractions in percent.

    They belong to the best checkpoint, which is the one that is kept and that generated the texts in the summary. They
    are measured on the split of the final evaluation in the summary if there is one, otherwise on the split of the
    evaluations during training.
    """
    best = next((line for line in reversed(evaluated) if line["step"] == summary["best_step"]), {})
    measured: dict[str, float | None] = {}
    metrics = summary.get("held_out") or {name: best.get(f"eval/{name}") for name in ("loss", "accuracy", "mae")}
    if task == "forecaster":
        measured = {"mse": metrics["loss"], "mae": metrics["mae"]}
    if task in ("classifier", "image_classifier", "masked_lm", "contrastive"):
        measured["accuracy"] = 100 * metrics["accuracy"]
    if task in ("sft", "grpo") and summary.get("held_out"):
        share = metrics["accuracy"] if task == "grpo" else metrics["others"].get("exact_match")
        measured |= {} if share is None else {"exact_match": 100 * share}
    if task == "dpo" and summary.get("held_out"):
        names = "prefers_chosen", "reference_prefers_chosen"
        measured |= {name: 100 * metrics["others"][name] for name in names if name in metrics["others"]}
    if summary.get("corpus"):
        measured |= {name: summary["corpus"][name] for name in ("bleu", "chrf")}
    for name, score in (("exact_match", (summary.get("exact_match") or {}).get("")), ("basics", summary.get("basics"))):
        if score:
            measured[name] = 100 * score["right"] / score["total"]
    if task == "masked_lm" and summary.get("held_out"):
        measured["loss"] = metrics["loss"]
    elif task in ("causal_lm", "masked_lm") or not measured:
        measured |= {"loss": summary["best_loss"], "last_loss": summary["eval_loss"]}
    return {name: round(measured[name], 4) for name in FIGURES if name in measured}


def command(recipe: Recipe) -> str:
    """Return the command that trains this recipe: the file of the recipe, and its differences as options.

    Data directories and fields that do not affect the result are left out. Absolute paths are reduced to the file name.

    Raises:
        ConfigError: configs/ has no recipe with this name.
    """
    base, _ = load_recipe_file(find_recipe(recipe.name, ROOT))
    must_match, may_change = difference(base, recipe)
    changed = [*must_match, *(change for change in may_change if change.field in SHOWN_FIELDS)]
    known = flatten(recipe)
    words = ["python", "train.py", f"configs/{recipe.name}.py"]
    if recipe.origin is not None:
        words += ["--init", _without_folder(recipe.origin.source.rstrip("/"))]
        known = {field: known[field] for field in known if not field.startswith("model.") or field[6:] in RECIPE_FIELDS}
    for change in changed:
        if change.field in known and not change.field.startswith(FILLED_IN):
            values = change.new if isinstance(change.new, tuple) else (change.new,)
            words += [f"--{change.field.replace('_', '-')}", *(_without_folder(str(value)) for value in values)]
    return shlex.join(words)


def _without_folder(path: str) -> str:
    return os.path.basename(path) if os.path.isabs(path) else path


def curve(evaluated: list[Mapping[str, Any]]) -> list[list[float]]:
    """Return [step, held-out loss] of at most `CURVE` evenly spaced evaluations, including the last one."""
    every = -(-len(evaluated) // CURVE)
    return [[line["step"], round(line["eval/loss"], 4)] for line in evaluated[::-1][:: max(every, 1)][::-1]]


def add(name: str, run: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Store a run in the file of its recipe, and return the path. It replaces a run with the same command."""
    path = folder / f"{name}.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content.pop("not_trained", None)
    others = [other for other in content.get("runs", []) if other["command"] != run["command"]]
    content["runs"] = sorted([*others, run], key=lambda run: (run["seed"], run["command"]))
    folder.mkdir(exist_ok=True)
    path.write_text(dump(content), encoding="utf-8")
    return path


def dump(content: Any) -> str:
    """Return JSON with one line per field of a run, which is compact and gives readable diffs."""
    runs = content.get("runs", [])
    fields = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items()]
    blocks = [
        "   {\n"
        + ",\n".join(f"    {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in run.items())
        + "\n   }"
        for run in runs
    ]
    fields = [line for line, key in zip(fields, content, strict=True) if key != "runs"]
    if runs:
        fields.append('  "runs": [\n' + ",\n".join(blocks) + "\n  ]")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def read(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return the contents of docs/results/ by recipe: the JSON, and under `text` the content of the Markdown file."""
    content = {}
    for path in sorted(folder.glob("*.json")):
        text = path.with_suffix(".md")
        content[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        content[path.stem]["text"] = text.read_text(encoding="utf-8").strip() if text.exists() else ""
    return content


def abouts() -> dict[str, str]:
    """Return the first lines of the docstrings of configs/*.py, by recipe."""
    files = sorted((ROOT / "configs").glob("*.py"))
    return {path.stem: load_recipe_file(path)[1].splitlines()[0] for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="record finished runs")
    adding.add_argument("workdirs", nargs="+", metavar="WORKDIR")
    adding.add_argument("--note", default="", help="remark on these runs, such as: other work on the machine")
    adding.add_argument("--machine", help="machine that the runs were trained on, if it is not this one")
    options = parser.parse_args()
    try:
        for workdir in options.workdirs if options.command else []:
            print(add(*record(workdir, options.machine or machine(), options.note)))
        PAGE.write_text(page(read(), abouts()), encoding="utf-8")
    except (ConfigError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
