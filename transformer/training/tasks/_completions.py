"""Evaluation with rewards: greedy completions of held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transformer.data.kinds._prompts import Prompt, PromptDataset
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.training.tasks._evaluation import EvalLoss, Evaluation

SCORE = "reward"
"""name of the score that evaluation computes instead of a loss; the higher, the better"""


def completion_text(dataset: PromptDataset, ids: Sequence[int]) -> str:
    """Return the text of a completion without its end token."""
    return dataset.tokenizer.decode([i for i in ids if i not in dataset.end_ids])


def evaluate_rewards(
    run: Evaluation, split: str = "validation", limit: int | None = None
) -> tuple[EvalLoss, list[tuple[str, str]]] | None:
    """Complete held-out prompts by greedy decoding; return their mean rewards, and (prompt, completion) of each.

    None if `run.should_stop` ended the evaluation.
    """
    judged: list[Prompt] = []
    completions: list[list[int]] = []
    dataset, rewards = run.dataset, run.rewards
    ends = dataset.end_ids or None
    for batch in dataset.eval_batches(split, limit):
        if run.should_stop():
            return None
        inside = batch["weights"] > 0
        # All rows, also those that only fill up the last batch, so that all batches have one compiled shape.
        ids = [row[:length] for row, length in zip(batch["tokens"], batch["lengths"], strict=True)]
        options = {"max_new_tokens": rewards.options.max_new_tokens, "eos_id": ends}
        found = generate(run.model, run.params, ids, sampling=Sampling(temperature=0.0), **options)
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
    result = EvalLoss(loss, float(len(judged)), accuracy, others=others, score=SCORE)
    return result, list(zip(map(_shown, judged), texts, strict=True))


def shown_completions(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a line for each (prompt, completion)."""
    return "\n".join(" ".join(f"{prompt} -> {completion}".splitlines()) for prompt, completion in pairs)


def _shown(prompt: Prompt) -> str:
    return prompt.prompt if isinstance(prompt.prompt, str) else str(prompt.prompt[-1].get("content", ""))
