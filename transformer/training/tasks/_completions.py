"""Evaluation with rewards: greedy completions of held-out prompts, and checks of prompts before training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import numpy as np

from transformer.config._checks import ConfigError
from transformer.data.kinds._prompts import Prompt, PromptDataset
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.training._recipe import Recipe
from transformer.training.metrics._summary import Summary
from transformer.training.tasks._evaluation import EvalLoss
from transformer.training.tasks._rewards import Rewards
from transformer.training.tasks._table import TASKS


def completion_text(dataset: PromptDataset, ids: Sequence[int]) -> str:
    """Return the text of a completion without its end token."""
    return dataset.tokenizer.decode([i for i in ids if i not in dataset.end_ids])


def check_prompts(recipe: Recipe, dataset: PromptDataset, rewards: Rewards) -> None:
    """Check before training that every reward takes the columns of every prompt, and that completions fit the model.

    Raises:
        ConfigError: they don't.
    """
    seen = set()
    for split in dataset.splits:
        for prompt in dataset.prompts_of(split):
            if (columns := frozenset(prompt.columns)) not in seen:
                seen.add(columns)
                rewards.check(prompt)
    model, new = recipe.model, recipe.grpo.max_new_tokens
    if model.position == "learned" and dataset.longest + new > model.max_length:
        raise ConfigError(
            f"grpo.max_new_tokens ({new}) and the longest prompt ({dataset.longest} tokens) must be together at most "
            f"model.max_length ({model.max_length}), the size of the learned position table. Lower one of them."
        )


def evaluate_rewards(
    recipe: Recipe,
    model: nn.Module,
    params: Any,
    dataset: PromptDataset,
    rewards: Rewards,
    *,
    split: str = "validation",
    limit: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[EvalLoss, list[tuple[str, str]]] | None:
    """Complete held-out prompts by greedy decoding; return their mean rewards, and (prompt, completion) of each.

    Args:
        recipe: recipe of the run.
        model: model of the run.
        params: its parameters.
        dataset: the prompts.
        rewards: rewards of the recipe.
        split: split of the prompts.
        limit: maximum number of batches; None: all.
        should_stop: called before each batch; True ends the evaluation, and the result is None.
    """
    judged: list[Prompt] = []
    completions: list[list[int]] = []
    ends = dataset.end_ids or None
    for batch in dataset.eval_batches(split, limit):
        if should_stop():
            return None
        inside = batch["weights"] > 0
        # All rows, also those that only fill up the last batch, so that all batches have one compiled shape.
        ids = [row[:length] for row, length in zip(batch["tokens"], batch["lengths"], strict=True)]
        options = {"max_new_tokens": recipe.grpo.max_new_tokens, "eos_id": ends}
        found = generate(model, params, ids, sampling=Sampling(temperature=0.0), **options)
        completions += [new for new, counts in zip(found, inside, strict=True) if counts]
        judged += [dataset.prompts_of(split)[row] for row in batch["rows"][inside]]
    texts = [completion_text(dataset, row) for row in completions]
    values = rewards(judged, texts)
    answers = [prompt.columns.get(dataset.config.answer_column) for prompt in judged]
    exact = [
        text.strip() == str(answer).strip() for text, answer in zip(texts, answers, strict=True) if answer is not None
    ]
    several = dict(zip(rewards.names, values.mean(0).tolist(), strict=True)) if len(rewards.names) > 1 else {}
    others = {f"reward/{name}": value for name, value in several.items()}
    others["completion_length"] = float(np.mean([len(row) for row in completions]))
    loss, accuracy = -float(rewards.total(values).mean()), float(np.mean(exact)) if exact else None
    result = EvalLoss(loss, float(len(judged)), accuracy, others=others, score=TASKS[recipe.task].score)
    return result, list(zip(map(_shown, judged), texts, strict=True))


def report_rewards(
    recipe: Recipe,
    model: nn.Module,
    params: Any,
    dataset: PromptDataset,
    rewards: Rewards,
    summary: Summary,
    should_stop: Callable[[], bool],
) -> Summary:
    """Add the mean reward of the test (or else validation) prompts and some completions; unchanged after a signal."""
    split = "test" if "test" in dataset.splits else "validation"
    found = evaluate_rewards(recipe, model, params, dataset, rewards, split=split, should_stop=should_stop)
    if found is None:
        return summary
    text = shown_completions(found[1][: recipe.evaluation.translations])
    return dataclasses.replace(summary, split=split, held_out=found[0], text=text, prompt=found[1][0][0])


def shown_completions(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a line for each (prompt, completion)."""
    return "\n".join(" ".join(f"{prompt} -> {completion}".splitlines()) for prompt, completion in pairs)


def _shown(prompt: Prompt) -> str:
    return prompt.prompt if isinstance(prompt.prompt, str) else str(prompt.prompt[-1].get("content", ""))
