"""`transformer-zoo evaluate run`: evaluate a run on its held-out data."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformer.cli._arguments import check_least, option_names_in_errors
from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError
from transformer.config._invocation import program

if TYPE_CHECKING:
    from transformer.data._dataset import Dataset
    from transformer.generate._beam import Beam
    from transformer.training.tasks._evaluation import EvalLoss, Evaluation
    from transformer.training.workdir._runs import Run


@dataclass(frozen=True, kw_only=True)
class EvaluateRun(ModelCommand):
    """Measure loss and perplexity, or the forecast error, on a split of the run's data.

    For translation, also translate the sources and compare them with the references: number words by exact match, other
    pairs by BLEU and chrF. The translations are written to DIR/hypotheses.SPLIT.txt, one per line in the order of the
    data; the references are written to DIR/references.SPLIT.txt.

    The data is read from the path in the run's recipe.
    """

    split: str | None = None
    """split of the data; None: test if there is one, otherwise validation"""
    examples: int | None = None
    """number of pairs to translate (evenly spaced sample); 0 disables it; None: 1000"""
    beam_size: int | None = None
    """beam size; 1 is greedy decoding; None: the value in the run's recipe"""
    alpha: float | None = None
    """length penalty: log-probabilities are divided by ((5 + length) / 6)^alpha; None: the value in the recipe"""
    trust_rewards: bool = False
    """run the reward functions that the run's recipe names: they are code, which runs with your permissions"""


def main(command: EvaluateRun) -> None:
    check_least("examples", command.examples, 0)
    opened = command.load()
    run = opened.run
    if run is None:
        raise ConfigError(
            f"{command.directory} contains weights but no recipe, so there is no data to evaluate on. Pass the workdir "
            f"of a training run, or use {program('evaluate tasks')} or {program('evaluate text')}."
        )

    from transformer.data._pipeline import prepare
    from transformer.training.tasks._table import TASKS

    task = TASKS[run.recipe.task]
    if not task.source and (command.examples, command.beam_size, command.alpha) != (None, None, None):
        raise ConfigError(
            f"--examples, --beam-size and --alpha need a translation model, but {command.directory} does not "
            f"translate. Remove them."
        )
    beam = _beam(command, run)
    dataset = prepare(run.recipe.data, tokenizer=run.tokenizer)
    same = _is_training_data(command, run, dataset)
    split = command.split or ("test" if "test" in dataset.splits else "validation")
    evaluation = _evaluation(command, run, dataset)
    result = task.measure(evaluation, split)
    values, lines = {}, []
    if task.source and command.examples != 0:
        values, lines = _translations(command, evaluation, split, beam)
    measures, summary = _measures(result, task.keeps_reference(run.recipe))
    found = {"exact_match": {}, **measures, "targets": int(result.targets), "same_data": same, **values}
    title = f"{command.directory}, step {run.step}, split {split}: {int(result.targets):,} targets"
    command.answer_of(opened, [title, summary, *lines], split=split, **found)


def _is_training_data(command: EvaluateRun, run: Run, dataset: Dataset) -> bool:
    """Return whether the data is that of the training; warn if it is not."""
    same = dataset.fingerprint == run.fingerprint
    if not same:
        warnings.warn(
            f"the data differs from the training data of {command.directory} (expected fingerprint "
            f"{run.fingerprint[:12]}, got {dataset.fingerprint[:12]}): the held-out set may contain training examples.",
            stacklevel=2,
        )
    return same


def _measures(result: EvalLoss, compares: bool) -> tuple[dict[str, float], str]:
    """Return the measures by name, and as one line; `compares`: the loss is no cross-entropy of tokens or classes."""
    measures = result.measures
    if result.accuracy is None or compares or result.score is not None:
        return measures, str(result)
    measures["perplexity"] = perplexity = math.exp(min(result.loss, 700.0))
    summary = f"loss: {result.loss:.4f} nats, perplexity {perplexity:.4g}, accuracy {100 * result.accuracy:.2f} %"
    if "exact_match" in measures:
        summary += f", exact match {100 * measures['exact_match']:.2f} % of the answers"
    if "bits_per_byte" in measures:
        summary += f", bits per byte {measures['bits_per_byte']:.4f}"
    return measures, summary


def _evaluation(command: EvaluateRun, run: Run, dataset: Dataset) -> Evaluation:
    """Return the evaluation of a run on its data, with the reference model and the rewards of its task."""
    from transformer.inference._reward_model import reward_model
    from transformer.training._step import compiled_eval_step
    from transformer.training.tasks._evaluation import Evaluation
    from transformer.training.tasks._rewards import Rewards
    from transformer.training.workdir._runs import load_reference

    recipe, rewards = run.recipe, None
    if recipe.grpo is not None:
        if not command.trust_rewards:
            named = [*recipe.grpo.rewards, *filter(None, [recipe.grpo.reward_model])]
            raise ConfigError(
                f"the recipe of {command.directory} names rewards ({', '.join(named)}), which are code or another "
                f"model, and evaluation would run them. If you trust this run, pass --trust-rewards."
            )
        rewards = Rewards(recipe.grpo, reward_model(recipe))
    reference = None if rewards is not None else load_reference(recipe, command.directory, run.step)
    return Evaluation(
        model=run.model,
        params=run.params,
        dataset=dataset,
        options=recipe.evaluation,
        eval_step=compiled_eval_step(recipe, reference),
        seed=recipe.training.seed,
        rewards=rewards,
    )


def _beam(command: EvaluateRun, run: Run) -> Beam | None:
    from transformer.training.tasks._translation import make_beam

    wanted = run.recipe.evaluation
    size = wanted.beam_size if command.beam_size is None else command.beam_size
    if size == 1 and command.alpha is not None:
        raise ConfigError(
            "--alpha is the length penalty of beam search, but the beam size is 1 (greedy). Pass --beam-size, or "
            "remove --alpha."
        )
    with option_names_in_errors(size="beam_size", alpha="alpha"):
        return make_beam(size, wanted.beam_alpha if command.alpha is None else command.alpha)


def _translations(
    command: EvaluateRun, run: Evaluation, split: str, beam: Beam | None
) -> tuple[dict[str, Any], list[str]]:
    """Translate examples of a split; return the results as JSON values and as lines to print."""
    from transformer.training.tasks._translation import corpus_score, scores, translations, write_lines

    data, directory = run.dataset.config, command.directory
    done = translations(run, split, 1000 if command.examples is None else command.examples, beam)
    found: dict[str, Any] = {"exact_match": {}}
    if data.bleu_tokenization is None:
        matches = scores(done)
        found["exact_match"] = {
            group or "all": {"right": s.right, "total": s.total, "rate": s.rate} for group, s in matches.items()
        }
        lines = [f"  {data.group_name} {g}: {s}" if g else f"exact match: {s}" for g, s in matches.items()]
    else:
        corpus = corpus_score(done, data.bleu_tokenization)
        found |= dataclasses.asdict(corpus)
        lines = corpus.lines(split)
    written = {"hypotheses": directory / f"hypotheses.{split}.txt", "references": directory / f"references.{split}.txt"}
    try:
        write_lines(written["hypotheses"], (item.output for item in done))
        write_lines(written["references"], (item.example.target for item in done))
    except OSError as error:  # the results are still printed
        warnings.warn(f"the translations could not be written: {error}", stacklevel=1)
        written = dict.fromkeys(written)
    else:
        lines += [f"{name}: {path}" for name, path in written.items()]
    found["beam"] = None if beam is None else {"size": beam.size, "alpha": beam.alpha}
    return found | {name: path and str(path) for name, path in written.items()}, lines
