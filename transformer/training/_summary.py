"""What a run says of itself at the end, on one screen, and keeps in `summary.json`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.config._invocation import program
from transformer.training._evaluation import EvalLoss
from transformer.training._tasks import TASKS
from transformer.training._translating import CorpusScore, Score

FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome of a call of `train`: the run's `name` and `workdir`, its number of `parameters`, measures, texts."""

    name: str
    workdir: str
    command: str
    """what goes on with this run"""
    task: str = "causal_lm"
    """what the model does: one of `tasks.TASKS`"""
    step: int = 0
    """updates done"""
    steps: int = 0
    """updates wanted"""
    stop_code: int | None = None
    """128 + signal when a signal stopped it"""
    parameters: int = 0
    seconds: float = 0.0
    """of training, evaluation and compilation, over all calls"""
    tokens_per_s: float = 0.0
    """target tokens a second while training"""
    skipped: int = 0
    """batches passed over because they were not finite, or a spike"""
    spikes: int = 0
    """batches whose loss was far above the usual one"""
    eval_loss: float | None = None
    """nats a target, at the last evaluation"""
    eval_accuracy: float | None = None
    """share of targets that were the likeliest, there"""
    eval_mae: float | None = None
    """mean absolute error of forecasts, there"""
    best_loss: float | None = None
    """nats a target, lowest of all evaluations"""
    best_step: int | None = None
    """step of the lowest eval loss, of a classifier of the highest accuracy"""
    shown_step: int | None = None
    """step of the model that wrote what follows: the best one that is kept, which is also what is used by default"""
    exact_match: dict[str, Score] = dataclasses.field(default_factory=dict)
    """by group of unseen examples; "" is all"""
    group_name: str = "group"
    """what these groups are"""
    basics: Score | None = None
    """of the split of basics, where the data has one"""
    corpus: CorpusScore | None = None
    """BLEU and chrF of unseen examples, where the data has text that they are for"""
    split: str = ""
    """part of the data that the unseen examples are of"""
    held_out: EvalLoss | None = None
    """what is measured on that part, where the data is numbers"""
    baseline: EvalLoss | None = None
    """what repeating the last step would give there (forecasts)"""
    translations: tuple[tuple[str, str, str], ...] = ()
    """(source, right target, output) of some unseen examples"""
    text: str = ""
    """a text of the model's own (running text)"""
    prompt: str = ""
    """what to try it with"""

    @property
    def finished(self) -> bool:
        """All steps are done."""
        return self.step >= self.steps

    @property
    def measures(self) -> dict[str, float]:
        """What metrics.jsonl gets of the outcome, by name."""
        told = {f"eval/exact_match{group and '/' + group}": score.rate for group, score in self.exact_match.items()}
        if self.corpus is not None:
            told |= {"eval/bleu": self.corpus.bleu, "eval/chrf": self.corpus.chrf}
        if self.held_out is not None:
            told |= {f"{self.split}/{name}": value for name, value in self.held_out.measures.items()}
        return told

    @property
    def exit_code(self) -> int:
        """What the process should return: 0, or 130 / 143 after Ctrl-C / SIGTERM."""
        return self.stop_code or 0


def save_summary(summary: Summary, workdir: str | os.PathLike) -> None:
    """Writes `workdir/summary.json`."""
    text = json.dumps(dataclasses.asdict(summary), indent=2, ensure_ascii=False)
    (Path(workdir) / FILE).write_text(text + "\n", encoding="utf-8")


def read_summary(workdir: str | os.PathLike) -> Summary | None:
    """The summary of a finished run, with `workdir` as given here: a run may have been moved or copied. None when there
    is none that can be read (it is a report, not the run's state).
    """
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
    """The screen that ends a finished run."""
    what = TASKS[summary.task].targets
    workdir = Path(summary.workdir)
    return "\n".join(
        [
            f"== {summary.name}: {summary.step} steps, {summary.parameters:,} parameters, {_time(summary.seconds)} ==",
            *_example_lines(summary),
            *_score_lines(summary),
            *_loss_lines(summary),
            f"speed: {summary.tokens_per_s:,.0f} {what}/s while training",
            f"loss curve: {workdir / 'loss.png'}   checkpoints: {workdir / 'checkpoints'}",
            "try it:",
            f"  {_next_command(summary)}",
        ]
    )


def _example_lines(summary: Summary) -> list[str]:
    """Translations or a text that the model generated, and of which step the model is."""
    lines = []
    if summary.shown_step not in (None, summary.step):
        best = "highest eval accuracy" if TASKS[summary.task].labels else "lowest eval loss"
        lines.append(f"what follows is of step {summary.shown_step}, of those that are kept the one of the {best}")
    if summary.translations:
        lines.append("translations of examples never trained on:")
        for source, target, output in summary.translations:
            lines.append(f"  {source}\n    -> {output}" + ("" if output == target else f"   (right: {target})"))
    if summary.text:
        lines += ["a text of its own:", *(f"  | {line}" for line in summary.text.splitlines())]
    return lines


def _score_lines(summary: Summary) -> list[str]:
    """Exact match, BLEU and chrF of translations."""
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
    """Loss on held-out data and on the test split, skipped batches and spikes."""
    lines = []
    if summary.eval_loss is not None:
        best = "" if summary.best_loss is None else f", best {summary.best_loss:.4f}"
        best += f" at step {summary.best_step}" if best and not TASKS[summary.task].labels else ""
        lines.append(f"eval loss: {summary.eval_loss:.4f}{best}")
    if summary.held_out is not None:
        baseline = "" if summary.baseline is None else f" (repeating the last step: {summary.baseline})"
        lines.append(f"{summary.split}: {summary.held_out}{baseline}")
    if summary.skipped:
        lines.append(f"batches passed over because their loss was a spike, or not finite: {summary.skipped}")
    if summary.spikes:
        lines.append(f"spikes of the loss: {summary.spikes}")
    return lines


def _next_command(summary: Summary) -> str:
    """The command that tries the trained model: generate or classify the prompt, or evaluate."""
    try_it, words = TASKS[summary.task].try_it, ["evaluate", str(Path(summary.workdir))]
    if summary.prompt and try_it is not None:
        words = [try_it[0], str(Path(summary.workdir)), try_it[1], summary.prompt]
    return f"{program(words[0])} {shlex.join(words[1:])}"


def render_stopped(summary: Summary) -> str:
    """What to say when a signal ended the run before its end."""
    if summary.finished:
        return f"training is finished and saved; the report was cut short. To see it:\n  {summary.command}"
    if not summary.step:
        return f"stopped before the first step: there is nothing to save. To start:\n  {summary.command}"
    return (
        f"stopped at step {summary.step} of {summary.steps}, everything is saved in {summary.workdir}. To go on:\n"
        f"  {summary.command}"
    )


def render_finished(summary: Summary) -> str:
    """What to say when there is nothing left to do."""
    return (
        f"this run is finished: {summary.step} of {summary.steps} steps are done. To train it longer:\n"
        f"  {summary.command} --training.steps {2 * summary.steps}"
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
