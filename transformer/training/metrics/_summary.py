"""The summary of a run, which is printed at the end of training and saved as `summary.json`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.config._invocation import program
from transformer.training.tasks._evaluation import EvalLoss
from transformer.training.tasks._results import Results
from transformer.training.tasks._table import TASKS
from transformer.training.tasks._translation import CorpusScore, Score

FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Summary(Results):
    """The outcome of a call of `train`."""

    name: str
    """name of the run"""
    workdir: str
    """directory of the run"""
    command: str
    """command that resumes this run"""
    temporary: bool = False
    """whether the workdir is removed after the run, so that nothing printed may point into it"""
    task: str = "causal_lm"
    """task of the model, one of `tasks.TASKS`"""
    step: int = 0
    """number of steps done"""
    steps: int = 0
    """number of steps of the full run"""
    stop_code: int | None = None
    """128 + signal if a signal stopped the run"""
    parameters: int = 0
    """number of parameters"""
    seconds: float = 0.0
    """time for training, evaluation and compilation, over all calls"""
    tokens_per_s: float = 0.0
    """target tokens per second during training"""
    skipped: int = 0
    """number of batches that were skipped because their loss was not finite, or a spike"""
    spikes: int = 0
    """number of batches whose loss was a spike"""
    eval_loss: float | None = None
    """loss at the last evaluation, in nats per target"""
    eval_accuracy: float | None = None
    """accuracy at the last evaluation: fraction of targets with the highest logit"""
    eval_mae: float | None = None
    """mean absolute error of forecasts at the last evaluation"""
    best_loss: float | None = None
    """lowest loss of all evaluations, in nats per target"""
    best_step: int | None = None
    """step with the lowest eval loss, or the highest accuracy of a classifier"""
    shown_step: int | None = None
    """step of the model that produced the results: the best kept checkpoint, which is also the default"""

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.steps

    @property
    def stopped(self) -> bool:
        """Whether SIGTERM or Ctrl-C stopped the run, so that the script should end, too."""
        return self.stop_code is not None

    def exit_if_stopped(self) -> None:
        """End the process with `exit_code` if a signal stopped the run; for scripts that continue after `train`.

        Raises:
            SystemExit: a signal stopped the run.
        """
        if self.stop_code is not None:
            raise SystemExit(self.stop_code)

    @property
    def measures(self) -> dict[str, float]:
        """Final measures by name, for metrics.jsonl."""
        values = {f"eval/exact_match{group and '/' + group}": score.rate for group, score in self.exact_match.items()}
        if self.corpus is not None:
            values |= {"eval/bleu": self.corpus.bleu, "eval/chrf": self.corpus.chrf}
        if self.held_out is not None:
            values |= {f"{self.split}/{name}": value for name, value in self.held_out.measures.items()}
        return values

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 0, or 130 / 143 after Ctrl-C / SIGTERM."""
        return self.stop_code or 0


def save_summary(summary: Summary, workdir: str | os.PathLike) -> None:
    """Write `workdir/summary.json`."""
    results = {field.name for field in dataclasses.fields(Results)}
    values = sorted(dataclasses.asdict(summary).items(), key=lambda pair: pair[0] in results)  # the results last
    text = json.dumps(dict(values), indent=2, ensure_ascii=False)
    (Path(workdir) / FILE).write_text(text + "\n", encoding="utf-8")


def read_summary(workdir: str | os.PathLike) -> Summary | None:
    """Read the summary of a finished run, which may have been moved to this workdir; None if it can't be read."""
    try:
        values: dict[str, Any] = json.loads((Path(workdir) / FILE).read_text(encoding="utf-8"))
        values["exact_match"] = {group: Score(**score) for group, score in values["exact_match"].items()}
        values["basics"] = None if values["basics"] is None else Score(**values["basics"])
        values["corpus"] = None if values.get("corpus") is None else CorpusScore(**values["corpus"])
        for name in ("held_out", "baseline"):
            values[name] = None if values.get(name) is None else EvalLoss(**values[name])
        values["translations"] = tuple(tuple(item) for item in values["translations"])
        return Summary(**{**values, "workdir": str(workdir)})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def render(summary: Summary) -> str:
    """Return the text that is printed at the end of a finished run."""
    what = TASKS[summary.task].targets
    return "\n".join(
        [
            f"== {summary.name}: {summary.step} steps, {summary.parameters:,} parameters, {_time(summary.seconds)} ==",
            *_example_lines(summary),
            *_score_lines(summary),
            *_loss_lines(summary),
            f"speed: {summary.tokens_per_s:,.0f} {what}/s while training",
            *_file_lines(summary),
        ]
    )


def _example_lines(summary: Summary) -> list[str]:
    """Return lines with translations or a generated text, and the step of the model that produced them."""
    lines = []
    if summary.shown_step not in (None, summary.step):
        best = TASKS[summary.task].best
        lines.append(f"the following is from step {summary.shown_step}, the kept checkpoint with the {best}")
    if summary.translations:
        lines.append(f"{TASKS[summary.task].shown}:")
        for source, target, output in summary.translations:
            lines.append(f"  {source}\n    -> {output}" + ("" if output == target else f"   (correct: {target})"))
    if summary.text:
        lines += ["generated text:", *(f"  | {line}" for line in summary.text.splitlines())]
    return lines


def _score_lines(summary: Summary) -> list[str]:
    """Return lines with exact match, BLEU and chrF of the translations."""
    lines = []
    if summary.exact_match:
        groups = dict(summary.exact_match)
        lines.append(f"exact match on unseen examples: {groups.pop('')}")
        lines += [f"  {summary.group_name} {group}: {score}" for group, score in groups.items()]
    if summary.corpus is not None:
        lines += summary.corpus.lines(summary.split)
    if summary.basics is not None:
        lines.append(f"exact match on the basics: {summary.basics}")
    return lines


def _loss_lines(summary: Summary) -> list[str]:
    """Return lines with the held-out loss, the measures on the test split, skipped batches and loss spikes."""
    lines = []
    if summary.eval_loss is not None:
        lines.append(TASKS[summary.task].eval_line(summary.eval_loss, summary.best_loss, summary.best_step))
    if summary.held_out is not None:
        baseline = "" if summary.baseline is None else f" (repeating the last step: {summary.baseline})"
        lines.append(f"{summary.split}: {summary.held_out}{baseline}")
    if summary.skipped:
        lines.append(f"batches skipped because their loss was a spike or not finite: {summary.skipped}")
    if summary.spikes:
        lines.append(f"loss spikes: {summary.spikes}")
    return lines


def _file_lines(summary: Summary) -> list[str]:
    """Return lines with the files of the run and a command that reads them; none if they are about to be removed."""
    if summary.temporary:
        return []
    workdir = Path(summary.workdir)
    files = f"loss curve: {workdir / 'loss.png'}   checkpoints: {workdir / 'checkpoints'}"
    return [files, "try it:", f"  {_next_command(summary)}"]


def _next_command(summary: Summary) -> str:
    """Return the command that tries the trained model: generate, classify or evaluate."""
    try_it, words = TASKS[summary.task].try_it, ["evaluate", "run", str(Path(summary.workdir))]
    if summary.prompt and try_it is not None:
        words = [try_it[0], str(Path(summary.workdir)), *shlex.split(try_it[1]), summary.prompt]
    return f"{program(words[0])} {shlex.join(words[1:])}"


def render_stopped(summary: Summary) -> str:
    """Return the text that is printed when a signal stopped the run."""
    if summary.finished:
        return f"training is finished and saved, but the report was interrupted. To see it:\n  {summary.command}"
    if not summary.step:
        return f"stopped before the first step, so there is nothing to save. To start:\n  {summary.command}"
    return (
        f"stopped at step {summary.step} of {summary.steps}; everything is saved in {summary.workdir}. To resume:\n"
        f"  {summary.command}"
    )


def render_finished(summary: Summary, extend: str) -> str:
    """Return the text that is printed when all steps were done before; `extend` explains how to train longer."""
    return f"this run is finished: {summary.step} of {summary.steps} steps are done. {extend}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
