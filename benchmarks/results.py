"""The figures of docs/results.md: recorded from the files that runs leave behind, and written as one page.

Usage: python -m benchmarks.results                        writes docs/results.md anew
       python -m benchmarks.results add WORKDIR ...        records finished runs first, each in the file of its recipe

What is recorded is read from a workdir's recipe.json, summary.json and metrics.jsonl and kept in
docs/results/RECIPE.json, one entry a run; a run with the command of one that is there replaces it. Machine and versions
are those of the machine that `add` runs on: run it where the training ran, or say --machine. Beside the `runs` such a
file holds what is written by hand: `published`, a figure of others with its source, and `not_trained`, why there are
none. docs/results/RECIPE.md, where there is one, follows the recipe's table.
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
from transformer.training._start import RECIPE_S
from transformer.viz import read_metrics

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
CURVE = 40
"""points of a curve that are kept at most"""
TOLD = ("training.steps", *(f"data.{field}" for field in sorted(PLACES - {"data_dir", "manual_dir"})))
"""fields that a command names though a run may go on with others"""
FILLED_IN = (
    *("model.vocab_size", "model.embedding.source_vocab_size", "model.output.num_classes", "origin"),
    *("data.labels", "data.columns", "data.mean", "data.std"),
)
"""fields of a run's recipe that training fills in"""


def record(workdir: str | os.PathLike, where: str, note: str = "") -> tuple[str, dict[str, Any]]:
    """The recipe's name, and what is kept of the finished run in `workdir`, made on the machine `where`.

    Raises:
        ConfigError: not the workdir of a finished run, or its recipe is none of configs/.
    """
    workdir = Path(workdir)
    recipe = load_recipe(workdir)
    try:
        summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{workdir / 'summary.json'} can't be read ({error}). Finish the run first.") from error
    if summary["step"] < summary["steps"]:
        raise ConfigError(f"{workdir}: {summary['step']} of {summary['steps']} steps are done. Finish the run first.")
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
    """What a run of a task is told by, names of `FIGURES`: losses in nats, shares in percent.

    Of the best checkpoint, which is the one that is kept and that wrote the summary's texts; on the part of the data
    that the summary measured at the end, or else on that of the evaluations.
    """
    best = next((line for line in reversed(evaluated) if line["step"] == summary["best_step"]), {})
    measured: dict[str, float | None] = {}
    told = summary.get("held_out") or {name: best.get(f"eval/{name}") for name in ("loss", "accuracy", "mae")}
    if task == "forecaster":
        measured = {"mse": told["loss"], "mae": told["mae"]}
    if task in ("classifier", "image_classifier", "masked_lm"):
        measured["accuracy"] = 100 * told["accuracy"]
    if summary.get("corpus"):
        measured |= {name: summary["corpus"][name] for name in ("bleu", "chrf")}
    for name, score in (("exact_match", (summary.get("exact_match") or {}).get("")), ("basics", summary.get("basics"))):
        if score:
            measured[name] = 100 * score["right"] / score["total"]
    if task == "masked_lm" and summary.get("held_out"):
        measured["loss"] = told["loss"]
    elif task in ("causal_lm", "masked_lm") or not measured:
        measured |= {"loss": summary["best_loss"], "last_loss": summary["eval_loss"]}
    return {name: round(measured[name], 4) for name in FIGURES if name in measured}


def command(recipe: Recipe) -> str:
    """What trains this recipe: its file, and as options what differs from it. Folders of data are left out, as are
    the fields that change nothing of the result; absolute paths lose theirs.

    Raises:
        ConfigError: no recipe of configs/ has this name.
    """
    base, _ = load_recipe_file(find_recipe(recipe.name, ROOT))
    must_match, may_change = difference(base, recipe)
    changed = [*must_match, *(change for change in may_change if change.field in TOLD)]
    known = flatten(recipe)
    words = ["python", "train.py", f"configs/{recipe.name}.py"]
    if recipe.origin is not None:
        words += ["--init", _without_folder(recipe.origin.source.rstrip("/"))]
        known = {field: known[field] for field in known if not field.startswith("model.") or field[6:] in RECIPE_S}
    for change in changed:
        if change.field in known and not change.field.startswith(FILLED_IN):
            values = change.new if isinstance(change.new, tuple) else (change.new,)
            words += [f"--{change.field.replace('_', '-')}", *(_without_folder(str(value)) for value in values)]
    return shlex.join(words)


def _without_folder(path: str) -> str:
    return os.path.basename(path) if os.path.isabs(path) else path


def curve(evaluated: list[Mapping[str, Any]]) -> list[list[float]]:
    """[step, held-out loss] of at most `CURVE` evaluations, evenly chosen, the last one among them."""
    every = -(-len(evaluated) // CURVE)
    return [[line["step"], round(line["eval/loss"], 4)] for line in evaluated[::-1][:: max(every, 1)][::-1]]


def add(name: str, run: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Puts a run into the file of its recipe, in place of one with the same command; gives the file."""
    path = folder / f"{name}.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content.pop("not_trained", None)
    others = [other for other in content.get("runs", []) if other["command"] != run["command"]]
    content["runs"] = sorted([*others, run], key=lambda run: (run["seed"], run["command"]))
    folder.mkdir(exist_ok=True)
    path.write_text(dump(content), encoding="utf-8")
    return path


def dump(content: Any) -> str:
    """JSON with a line for each field of a run: short, and a difference of two versions can be read."""
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
    """What docs/results/ holds by recipe: the JSON, and under `text` the paragraphs written by hand."""
    content = {}
    for path in sorted(folder.glob("*.json")):
        text = path.with_suffix(".md")
        content[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        content[path.stem]["text"] = text.read_text(encoding="utf-8").strip() if text.exists() else ""
    return content


def abouts() -> dict[str, str]:
    """First lines of the docstrings of configs/*.py, by recipe."""
    files = sorted((ROOT / "configs").glob("*.py"))
    return {path.stem: load_recipe_file(path)[1].splitlines()[0] for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="record finished runs")
    adding.add_argument("workdirs", nargs="+", metavar="WORKDIR")
    adding.add_argument("--note", default="", help="a remark on these runs, such as other work on the machine")
    adding.add_argument("--machine", help="what they ran on, where that is not this machine")
    options = parser.parse_args()
    try:
        for workdir in options.workdirs if options.command else []:
            print(add(*record(workdir, options.machine or machine(), options.note)))
        PAGE.write_text(page(read(), abouts()), encoding="utf-8")
    except (ConfigError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
