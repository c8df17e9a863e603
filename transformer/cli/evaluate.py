"""`python -m transformer evaluate`: how good a trained model is on data it never saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformer.cli.arguments import parse
from transformer.cli.models import ModelCommand
from transformer.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Evaluate(ModelCommand):
    """Measures loss and perplexity on a split of the run's data; for pairs also translates and compares word by word.

    The data is read from where the run had it.
    """

    split: str | None = None
    """part of the data; None: test where there is one, else validation"""
    examples: int = 1000
    """pairs that are translated; 0: none"""


def main(arguments: Sequence[str]) -> None:
    """Prints the measures."""
    command = parse(Evaluate, "evaluate", arguments)
    if command.examples < 0:
        raise ConfigError(f"--examples must be at least 0, got {command.examples}.")
    opened = command.load()
    run = opened.run
    if run is None:
        raise ConfigError(
            f"{command.directory} holds weights and no recipe: there is no data to evaluate on. `score` gives the "
            f"perplexity of a text of yours."
        )

    import jax

    from transformer.data import prepare
    from transformer.training.evaluation import Translation, evaluate_loss, scores, translate
    from transformer.training.step import make_eval_step

    dataset = prepare(run.recipe.data, tokenizer=run.tokenizer)
    split = command.split or ("test" if "test" in dataset.splits else "validation")
    batches = dataset.eval_batches(split)
    result = evaluate_loss(jax.jit(make_eval_step(run.recipe)), run.params, batches)
    matches = {}
    if run.recipe.task == "seq2seq" and command.examples:
        examples = dataset.examples(split, command.examples)
        outputs = translate(
            run.model,
            run.params,
            run.tokenizer,
            [example.source for example in examples],
            max_new_tokens=batches[0]["tokens"].shape[1],
            batch_size=run.recipe.data.eval_batch_size,
        )
        matches = scores([Translation(*pair) for pair in zip(examples, outputs, strict=True)])
    perplexity = math.exp(min(result.loss, 700.0))
    if command.json:
        exact = {group or "all": {"right": s.right, "total": s.total, "rate": s.rate} for group, s in matches.items()}
        command.print_json(
            opened,
            split=split,
            loss=result.loss,
            perplexity=perplexity,
            accuracy=result.accuracy,
            targets=int(result.targets),
            exact_match=exact,
        )
        return
    print(f"{command.directory}, step {run.step}, split {split}: {int(result.targets):,} targets")
    print(f"loss: {result.loss:.4f} nats, perplexity {perplexity:.4g}, accuracy {100 * result.accuracy:.2f} %")
    for group, score in matches.items():
        print(f"  {run.recipe.data.group_name} {group}: {score}" if group else f"exact match: {score}")
