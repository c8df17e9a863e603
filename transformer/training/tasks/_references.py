"""Tasks whose loss compares the model with a frozen reference model, the model before training."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.data._dataset import DataKind
from transformer.data.kinds._prompts import Prompt, PromptDataset
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.nn._axes import Array, Bool, Float
from transformer.nn._masks import Mask
from transformer.nn.models._causal_lm import CausalLM
from transformer.training._settings import TrainingConfig
from transformer.training.tasks._base import (
    Options,
    Shapes,
    Sums,
    Task,
    TaskRecipe,
    check_whole_sequences,
    has_router,
    row_lengths,
    target_shapes,
)
from transformer.training.tasks._evaluation import EvalLoss, Evaluation
from transformer.training.tasks._log_probabilities import log_probabilities, token_values
from transformer.training.tasks._losses import Batch, Scalar
from transformer.training.tasks._policy_gradient import GRPO, policy_loss, reward_names, row_weights, token_scores
from transformer.training.tasks._preference import DPO, preference_losses
from transformer.training.tasks._results import Results

SCORE = "reward"
"""name of the score that evaluation computes instead of a loss; the higher, the better"""


def completion_text(dataset: PromptDataset, ids: Sequence[int]) -> str:
    """Return the text of a completion without its end token."""
    return dataset.tokenizer.decode([i for i in ids if i not in dataset.end_ids])


def evaluate_rewards(
    run: Evaluation, split: str = "validation", limit: int | None = None
) -> tuple[EvalLoss, list[tuple[str, str]]] | None:
    """Complete held-out prompts greedily; return mean rewards, and (prompt, completion) of each; None if it was
    stopped.
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


class ReferenceTask(Task):
    """Base class of tasks that train a causal model by comparing it with a reference model."""

    model = CausalLM
    try_it = ("generate", "--prompt")
    instead: ClassVar[str] = ""
    """what the task has instead of label smoothing, for the error message"""

    def check(self, training: TrainingConfig) -> None:
        if training.label_smoothing or training.z_loss:
            raise ConfigError(
                f"training.label_smoothing and training.z_loss belong to the loss of tokens, which the task "
                f"{self.name} does not have. Leave them at 0{self.instead}."
            )

    def check_recipe(self, recipe: TaskRecipe) -> None:
        super().check_recipe(recipe)
        check_whole_sequences(self, recipe)

    def keeps_reference(self, recipe: TaskRecipe) -> bool:
        return True

    def sums(self, model: nn.Module, params: PyTree, batch: Batch, reference: PyTree, options: Options) -> Sums:
        loss_sum, weight, others, _ = self.compared(model, params, reference, batch, options, deterministic=True)
        return {"loss_sum": loss_sum, "weight": weight, **others}

    @abstractmethod
    def compared(
        self,
        model: nn.Module,
        params: PyTree,
        reference: PyTree,
        batch: Batch,
        options: Options,
        loss_tokens: int | None = None,
        **arguments: Any,
    ) -> tuple[Scalar, Scalar, Sums, Scalar | None]:
        """Compute the loss of a model in comparison with the reference model, whose parameters get no gradient.

        Returns (loss sum, weight, other sums by name, router loss or None), as `_step.training_loss` and `measures`.
        `arguments` are those of the model for training, `deterministic` and `rngs`.
        """


class PreferenceOptimization(ReferenceTask):
    """Make chosen responses more probable than rejected ones, in comparison with the model before training (DPO).

    A batch has tokens, targets and weights (B, 2, T): [:, 0] is the chosen response after its prompt, [:, 1] the
    rejected one. Weights are 1 for the tokens of the response, otherwise 0. The pair of a row stays on its device.
    """

    name = "dpo"
    lengths = "data.max_length"
    targets = "pairs"
    unit = "loss per pair"
    instead = "; dpo.label_smoothing is for swapped pairs"

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        batch = _one_response_per_row(batch)
        mask = Mask.lengths(row_lengths(batch["weights"])) if has_router(config) else None
        return {"tokens": batch["tokens"], "positions": None, "mask": mask}

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return target_shapes((rows, 2, data.max_length))

    def sequences(self, config: TransformerConfig, batch: Shapes) -> tuple[int, int]:
        rows, responses, length = batch["tokens"].shape
        return rows * responses, length

    def options(self, recipe: TaskRecipe) -> DPO:
        return recipe.dpo or DPO()

    def means(self, recipe: TaskRecipe) -> Mapping[str, tuple[str, str]]:
        names = "reward_margin", "chosen_reward", "rejected_reward", "prefers_chosen", "reference_prefers_chosen"
        found = {name: (name, "weight") for name in names}
        return {"correct": ("accuracy", "weight")} | found

    def compared(self, model, params, reference, batch, options, loss_tokens=None, **arguments):
        rows, inputs = _one_response_per_row(batch), self.inputs(model.config, batch)
        targets = rows["targets"]
        own, aux = log_probabilities(model, params, inputs, targets, tokens=loss_tokens, **arguments)
        theirs, _ = log_probabilities(model, reference, inputs, targets, tokens=loss_tokens, deterministic=True)
        # (2B, T) -> (B, 2): sums over the tokens of each response. `where`: 0 times a non-finite number is NaN.
        inside = rows["weights"] > 0
        scores = jnp.where(inside, own - jax.lax.stop_gradient(theirs), 0.0).sum(-1).reshape(-1, 2)
        # (2, B): whether the chosen response is the more probable one, under this model and under the reference.
        chosen_first = [_more_probable(jnp.where(inside, each, 0.0)) for each in (own, theirs)]
        lengths = inside.sum(-1).astype(jnp.float32).reshape(-1, 2)
        losses = preference_losses(scores[:, 0], scores[:, 1], lengths[:, 0], lengths[:, 1], options)
        pairs = (lengths > 0).all(-1).astype(jnp.float32)  # (B,), 0 for rows that only fill up the batch
        rewards = options.beta * jax.lax.stop_gradient(scores)  # Rafailov et al. 2023, section 5.1
        margins = rewards[:, 0] - rewards[:, 1]
        sums = {
            "correct": ((margins > 0) * pairs).sum(),
            "reward_margin": (margins * pairs).sum(),
            "chosen_reward": (rewards[:, 0] * pairs).sum(),
            "rejected_reward": (rewards[:, 1] * pairs).sum(),
            "prefers_chosen": (chosen_first[0] * pairs).sum(),
            "reference_prefers_chosen": (chosen_first[1] * pairs).sum(),
        }
        router = None
        if aux:  # sums over the tokens of a row -> the mean over the two rows of a pair
            means = sum(aux.values()) / jnp.maximum(row_lengths(rows["weights"]), 1)
            router = (means.reshape(-1, 2).mean(-1) * pairs).sum()
        return (losses * pairs).sum(), pairs.sum(), sums, router


class PolicyOptimization(ReferenceTask):
    """Make completions with high rewards more probable (GRPO).

    A batch has tokens, targets and weights (R, T), one row for each completion after its prompt, with weight 1 for the
    tokens of the completion; lengths (R,) without padding; advantages (R,); old log-probabilities (R, T), if a set of
    completions is used for several steps; and for the metrics rewards (R, K), reward, reward_std, equal_rewards and
    truncated (R,). The data contains prompts, from which `Rollouts` makes the batch.
    """

    name = "grpo"
    lengths = "data.max_prompt_length"
    best = f"highest eval {SCORE}"
    targets = "completions"
    unit = "loss per completion"

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        mask = Mask.lengths(batch["lengths"]) if has_router(config) else None
        return {"tokens": batch["tokens"], "positions": None, "mask": mask}

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return target_shapes((rows, data.max_prompt_length))  # of the prompts

    def batch_shapes(self, recipe: TaskRecipe, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        options, rows = recipe.grpo, rows * recipe.grpo.group_size
        found = target_shapes((rows, recipe.data.max_prompt_length + options.max_new_tokens))
        each = dict.fromkeys(("advantages", "reward", "reward_std", "equal_rewards", "truncated"), (rows,))
        each |= {"rewards": (rows, len(options.weights))}
        each |= {"old": found["targets"].shape} if options.epochs > 1 else {}
        found |= {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in each.items()}
        return found | {"lengths": jax.ShapeDtypeStruct((rows,), jnp.int32)}

    def check_recipe(self, recipe: TaskRecipe) -> None:
        options = recipe.grpo
        if options is None or not options.weights:
            raise ConfigError(
                "grpo.rewards must name a function that returns the reward of a completion, got none. Set it to "
                "'file.py:function', or set grpo.reward_model."
            )
        if recipe.parallel.kind == "pmap":
            raise ConfigError(
                "parallel.kind pmap can't train on completions that the model writes: they are written by one program "
                "for all devices. Use --parallel.kind mesh; with all axes except data at 1 it splits the rows too."
            )
        if recipe.model.dropout_rate or recipe.model.attention.dropout_rate:
            raise ConfigError(
                "grpo compares the probabilities of the same model, which dropout would change. Set model.dropout_rate "
                "and model.attention.dropout_rate to 0."
            )
        every = {"training.steps": recipe.training.steps, "evaluation.every": recipe.evaluation.every}
        for field, steps in (every | {"checkpoint.every": recipe.checkpoint.every}).items():
            if steps is not None and steps % options.epochs:
                raise ConfigError(
                    f"{field} ({steps}) must be a multiple of grpo.epochs ({options.epochs}), the number of steps on "
                    f"each set of completions. Change one of them."
                )
        super().check_recipe(recipe)

    def options(self, recipe: TaskRecipe) -> GRPO | None:
        return recipe.grpo

    def measure(self, run: Evaluation, split: str = "validation", limit: int | None = None) -> EvalLoss | None:
        found = evaluate_rewards(run, split, limit)
        return None if found is None else found[0]

    def evaluate(self, run: Evaluation) -> tuple[EvalLoss | None, str]:
        found = evaluate_rewards(run, limit=run.options.batches)
        return (None, "") if found is None else (found[0], shown_completions(found[1][: run.options.samples]))

    def report(self, run: Evaluation, folder: Path) -> Results | None:
        found = evaluate_rewards(run, run.unseen)
        if found is None:
            return None
        text = shown_completions(found[1][: run.options.translations])
        return Results(split=run.unseen, held_out=found[0], text=text, prompt=found[1][0][0])

    def eval_line(self, loss: float, best: float | None, step: int | None) -> str:
        return super().eval_line(-loss, None if best is None else -best, step).replace("loss", SCORE, 1)

    def keeps_reference(self, recipe: TaskRecipe) -> bool:
        return recipe.grpo is not None and recipe.grpo.beta > 0

    def means(self, recipe: TaskRecipe) -> Mapping[str, tuple[str, str]]:
        found = dict.fromkeys(("reward", "reward_std", "equal_rewards", "truncated", "completion_length"), "rows")
        found |= dict.fromkeys(("entropy", "clipped", *(["kl"] if recipe.grpo.beta else [])), "tokens")
        named = {name: (name, per) for name, per in found.items()}
        names = reward_names(recipe.grpo)
        several = {f"reward_{i}": (f"reward/{name}", "rows") for i, name in enumerate(names)}
        return named | (several if len(names) > 1 else {})

    def compared(self, model, params, reference, batch, options, loss_tokens=None, **arguments):
        def scores(params, **arguments):
            function = functools.partial(token_scores, temperature=options.temperature)
            inputs = self.inputs(model.config, batch)
            return token_values(function, model, params, inputs, batch["targets"], tokens=loss_tokens, **arguments)

        (own, entropy), aux = scores(params, **arguments)
        given = dict(batch)
        if options.beta:
            given["reference"] = jax.lax.stop_gradient(scores(reference, deterministic=True)[0][0])
        loss_sum, weight, sums = policy_loss(own, given, options)
        rows = (batch["weights"] > 0).any(-1).astype(jnp.float32)
        sums |= {"rows": rows.sum(), "entropy": (entropy * batch["weights"]).sum()}
        sums["completion_length"] = batch["weights"].sum()
        for name in ("reward", "reward_std", "equal_rewards", "truncated"):
            sums[name] = (batch[name] * rows).sum()
        if batch["rewards"].shape[1] > 1:
            each = (batch["rewards"] * rows[:, None]).sum(0)
            sums |= {f"reward_{i}": total for i, total in enumerate(each)}
        router = None
        if aux:  # sums over the tokens of a row -> means, each with the weight of its row, not that of its micro-batch
            means = sum(aux.values()) / jnp.maximum(batch["lengths"], 1)
            router = (means * row_weights(batch["weights"], options)).sum()
        return loss_sum, weight, sums, router


def _more_probable(scores: Float[Array, "R T"]) -> Bool[Array, "B"]:
    """Return whether the chosen response of each pair is more probable; scores are 0 outside the responses."""
    totals = jax.lax.stop_gradient(scores).sum(-1).reshape(-1, 2)
    return totals[:, 0] > totals[:, 1]


def _one_response_per_row(batch: Batch) -> Batch:
    """Return the arrays (B, 2, T) of pairs as (2B, T)."""
    return {name: array.reshape(-1, array.shape[-1]) for name, array in batch.items()}
