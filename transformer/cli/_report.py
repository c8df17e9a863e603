"""`transformer-zoo report`: an HTML report of one run, or a comparison of several runs."""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer import __version__
from transformer.cli._arguments import Command
from transformer.config._checks import ConfigError
from transformer.config._invocation import program

if TYPE_CHECKING:
    from transformer.training._recipe import Recipe
    from transformer.training.metrics._summary import Summary
    from transformer.viz._report_page import RunReport


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write an HTML report of a run: curves of loss, learning rate, gradient norm and throughput, samples over time,
    the resolved recipe, versions, and the commands that reproduce the run.

    Several runs are compared on one page. Each plot is also written as a PNG file, in a directory next to the page. The
    runs are not changed and may still be training.
    """

    workdirs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="WORKDIR")]
    """workdirs of runs, such as runs/number_words"""
    output: Path | None = None
    """HTML file to write, with PNG files in NAME_plots; None: report.html or comparison.html in the first workdir"""
    overwrite: bool = False
    """replace files at --output that this program did not write"""


def main(command: Report) -> None:
    workdirs = [*dict.fromkeys(Path(os.path.normpath(path)) for path in command.workdirs)]
    output, ours = command.output, command.output is None  # this program owns the file names in a workdir
    if output is None:
        output = workdirs[0] / ("report.html" if len(workdirs) == 1 else "comparison.html")
    if output.is_dir() or output.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output must name the HTML file to write, such as report.html, got {output}.")

    from transformer.viz._output_files import check_replaceable
    from transformer.viz._report_page import save_report

    if not (ours or command.overwrite):  # check before the runs are read
        check_replaceable([output])
    again = shlex.join([*map(str, workdirs), *(["--output", str(output)] if command.output else [])])
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    names = names_of(workdirs)
    runs = [read_run(path, name) for path, name in zip(workdirs, names, strict=True)]
    made = f"{now}, transformer-zoo {__version__}: {program('report')} {again}"
    title = " and ".join(names) if len(names) < 4 else f"{len(names)} runs"
    paths = save_report(runs, output, title=title, made=made, overwrite=ours or command.overwrite)
    page, *pictures = map(str, paths)
    facts = [{"name": run.name, "status": run.status, **run.facts} for run in runs]
    command.answer([page, *pictures], {"page": page, "pictures": pictures, "runs": facts})


def names_of(workdirs: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or the full paths if two last parts are equal."""
    short = [Path(os.path.realpath(path)).name for path in workdirs]
    return short if len(set(short)) == len(short) else [str(path) for path in workdirs]


def read_run(workdir: Path, name: str) -> RunReport:
    """Read the report data of a run from its workdir."""
    from transformer.training._recipe import load_recipe
    from transformer.training._serial import flatten
    from transformer.training.metrics._report import read_calls, read_example, read_samples
    from transformer.training.metrics._summary import read_summary, render
    from transformer.training.metrics._writer import FILE
    from transformer.training.tasks._table import TASKS
    from transformer.viz._records import read_metrics
    from transformer.viz._report_page import RunReport

    recipe = load_recipe(workdir)
    metrics = workdir / FILE
    records = read_metrics(metrics) if metrics.exists() else []
    step = max((record["step"] for record in records), default=0)
    summary = read_summary(workdir)
    if summary is not None and summary.step < step:
        summary = None  # written before the run was resumed
    calls = read_calls(workdir)
    return RunReport(
        name=name,
        status=status_of(workdir, recipe, step, summary),
        facts=_facts(recipe, records, summary, calls),
        records=records,
        unit=TASKS[recipe.task].unit,
        targets=TASKS[recipe.task].targets,
        outcome="" if summary is None else render(summary),
        example=read_example(workdir),
        samples=read_samples(workdir),
        recipe=flatten(recipe),
        versions=calls[-1]["versions"] if calls else {},
        calls=[_call_text(call) for call in calls],
        commands=_commands(workdir, recipe, summary, calls),
    )


def status_of(workdir: Path, recipe: Recipe, step: int, summary: Summary | None) -> str:
    """Return the status of a run whose last logged step is `step`."""
    from transformer.training.workdir._lock import in_use
    from transformer.training.workdir._runs import is_average

    steps = recipe.training.steps
    if is_average(workdir):
        return "an average of checkpoints of another run"
    if in_use(workdir):
        return f"running, step {step:,} of {steps:,}"
    if summary is not None and summary.step >= steps:
        return f"finished, {summary.step:,} steps"
    return f"stopped at or after step {step:,} of {steps:,}" if step else "nothing logged yet"


def _facts(recipe: Recipe, records: Sequence[dict], summary: Summary | None, calls: Sequence[dict]) -> dict[str, str]:
    from transformer.training.tasks._table import TASKS

    facts = {"recipe": recipe.name, "task": recipe.task}
    if calls:
        facts["device"] = calls[-1]["device"].removeprefix("device: ")
    if summary is not None:
        facts["parameters"] = f"{summary.parameters:,}"
        facts["time"] = f"{summary.seconds / 60:,.1f} minutes, including evaluation and compilation"
        facts["speed"] = f"{summary.tokens_per_s:,.0f} {TASKS[recipe.task].targets}/s while training"
    losses = [(record["eval/loss"], record["step"]) for record in records if "eval/loss" in record]
    if losses:
        best, at = min((pair for pair in losses if pair[0] == pair[0]), default=losses[-1])
        facts["held-out loss"] = f"{losses[-1][0]:.4f} {TASKS[recipe.task].unit}, best {best:.4f} at step {at:,}"
    compiling = sum(record.get("perf/compile_s", 0.0) for record in records)
    if compiling:
        facts["compilation"] = f"{compiling:,.1f} s"
    return facts


def _call_text(call: dict[str, Any]) -> str:
    shown = ", ".join(f"{name} {version}" for name, version in call["versions"].items())
    return f"{call['time']} from step {call['step']:,}: {call['command']}\n  {call['device']}; {shown}"


def _commands(workdir: Path, recipe: Recipe, summary: Summary | None, calls: Sequence[dict]) -> dict[str, str]:
    from transformer.training.tasks._table import TASKS

    command = calls[0]["command"] if calls else "" if summary is None else summary.command
    commands = {}
    if command:
        commands["Repeat the run in a new workdir:"] = in_another_workdir(command, f"{workdir}-again")
    versions = calls[-1]["versions"] if calls else {}
    pins = [f"{name}=={version}" for name, version in versions.items() if name not in ("python", "transformer-zoo")]
    if pins:
        commands["Install the same versions:"] = f"pip install {' '.join(pins)}"
    where = shlex.quote(str(workdir))
    commands["Evaluate it on held-out data:"] = f"{program('evaluate run')} {where}"
    task = TASKS[recipe.task]
    if task.writes and task.try_it is not None:
        prompt = summary.prompt if summary is not None and summary.prompt else "..."
        command, options = task.try_it
        commands["Generate text:"] = f"{program(command)} {where} {options} {shlex.quote(prompt)}"
    return commands


def in_another_workdir(command: str, workdir: str) -> str:
    """Return the command line with another --workdir; unchanged if it has no --workdir or can't be parsed."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    for place, word in enumerate(words):
        if word == "--workdir" and place + 1 < len(words):
            return shlex.join([*words[: place + 1], workdir, *words[place + 2 :]])
        if word.startswith("--workdir="):
            return shlex.join([*words[:place], f"--workdir={workdir}", *words[place + 1 :]])
    return command
