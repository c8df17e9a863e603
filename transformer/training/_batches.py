"""Where the batches of training come from: the data, or completions by the current policy and their rewards."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from transformer.config._checks import ConfigError
from transformer.data._dataset import Batch, Dataset
from transformer.data.kinds._prompts import PromptDataset
from transformer.generate._decoding import Batch as Rows
from transformer.generate._generation import check_finite
from transformer.generate._loop import DecodeResult, decode
from transformer.generate._prompts import bucket, decoding_model
from transformer.generate._sampling import SamplerParams, Sampling
from transformer.nn._sharding import place_batch
from transformer.training._parallel import MeshPlacement, Placement
from transformer.training._recipe import Recipe
from transformer.training._state import TrainState, make_usable, model_params
from transformer.training.tasks._log_probabilities import token_values
from transformer.training.tasks._policy_gradient import advantages, equal_rewards, token_scores
from transformer.training.tasks._references import completion_text
from transformer.training.tasks._rewards import RewardModel, Rewards
from transformer.training.tasks._table import TASKS
from transformer.training.workdir._journal import Journal

_SAMPLING = 2**31 - 3  # folded into the key of a step, so that sampling and dropout never share a key


class Supervision:
    """Training batches of data with targets. `Rollouts` has the same methods, for data without."""

    rewards: Rewards | None = None

    def __init__(self, recipe: Recipe, dataset: Dataset, placement: Placement):
        self._seed, self._dataset, self._rows = recipe.training.seed, dataset, placement.rows

    def start(self) -> Iterator[Batch]:
        """Return the iterator over the batches, with the rows of this process."""
        return self._dataset.train_batches(self._seed, self._rows)

    def batch(self, state: TrainState, step: int, batches: Iterator[Batch]) -> Batch:
        """Return the batch for the next step, after `step` steps, from the result of `start`."""
        return next(batches)

    def record(self, journal: Journal, seconds: float) -> None:
        """Record in the journal how many seconds the last batch took."""
        journal.fed(seconds)

    def unfinished(self, step: int) -> bool:
        """Return whether the run can't stop before the next step."""
        return False


class Rollouts:
    """Makes the training batches of GRPO.

    The batch of step n is a function of the state before it, the prompts of step n and the seed. So a resumed run makes
    the same batches as an uninterrupted one. ConfigError if a reward can't be used, or prompts with completions are
    longer than a learned position table.
    """

    def __init__(
        self, recipe: Recipe, dataset: PromptDataset, model: nn.Module, placement: MeshPlacement, rewards: Rewards
    ):
        self._recipe, self._options, self._dataset = recipe, recipe.grpo, dataset
        self._placement, self._ends = placement, dataset.end_ids
        check_prompts(recipe, dataset, rewards)
        new, limit = self._options.max_new_tokens, model.config.max_length
        slots = bucket(dataset.longest)
        self._prompt_slots = slots if limit is None else min(slots, limit)
        length = bucket(dataset.longest + new - 1)
        self._length = length if limit is None else min(length, limit)
        """T, length of the rows of a training batch, the same for all batches"""
        sampling = Sampling(temperature=self._options.temperature, top_k=self._options.top_k)
        self._choice = SamplerParams.of(sampling, model.config.vocab_size)
        self._everywhere = NamedSharding(placement.mesh, PartitionSpec())
        room = {"cache_slots": self._prompt_slots + bucket(new), "new_slots": bucket(new)}
        sample = functools.partial(_sample, decoding_model(model), seed=recipe.training.seed, limit=new, **room)
        self._sample = jax.jit(sample, out_shardings=self._everywhere)
        score = functools.partial(_log_probs, recipe, model)
        self._score = jax.jit(score, out_shardings=self._everywhere)
        self._policy = make_usable(recipe)
        self.rewards = rewards
        self._batch: Batch | None = None
        self.seconds = 0.0
        """duration of the last rollout"""

    def start(self) -> Iterator[Batch]:
        """Return the iterator over batches of all prompts: all processes write the completions together."""
        return self._dataset.train_batches(self._recipe.training.seed, None)

    def record(self, journal: Journal, seconds: float) -> None:
        """Record the duration of the last rollout in the journal."""
        journal.rolled(self.seconds)

    def unfinished(self, step: int) -> bool:
        """Return whether the next step uses the last completions again (`GRPO.epochs`), which a checkpoint does not
        contain.
        """
        return step % self._options.epochs != 0

    def batch(self, state: TrainState, step: int, prompts: Iterator[Batch]) -> Batch:
        """Return the rows of this process of the batch for the next step; `prompts` are the same for all processes.

        RewardError if a reward is not a finite number; ValueError if the logits of a row are not finite.
        """
        began = time.perf_counter()
        if not self.unfinished(step) or self._batch is None:
            whole = self._completed(state, step, next(prompts))
            if self._options.epochs > 1:
                whole["old"] = self._log_probs(state, whole)
            rows = self._placement.rows(len(whole["weights"]))
            self._batch = {name: array[rows] for name, array in whole.items()}
        self.seconds = time.perf_counter() - began
        return self._batch

    def _completed(self, state: TrainState, step: int, prompts: Batch) -> Batch:
        """Let the policy write a group of completions for each prompt, and return the whole batch."""
        group = self._options.group_size
        ids = np.repeat(_padded(prompts["tokens"], self._prompt_slots), group, 0)
        lengths = np.repeat(prompts["lengths"], group)
        with jax.set_mesh(self._placement.mesh):
            placed = place_batch({"tokens": ids, "lengths": lengths}, self._placement.mesh)
            ends = np.array(self._ends or [-1], np.int32)
            policy = self._policy(state.replace(ema=None))  # the trained parameters, not their average
            result = jax.device_get(self._sample(policy, Rows(**placed), np.int32(step), self._choice, ends))
        check_finite(result.failed_at, [row[:n] for row, n in zip(ids, lengths, strict=True)], {}, "")
        completions, truncated = completed_ids(result, self._options.max_new_tokens)
        places = self._dataset.prompts_of("train")
        judged = [places[row] for row in np.repeat(prompts["rows"], group)]
        values = self.rewards(judged, [completion_text(self._dataset, row) for row in completions])
        return self._assembled(ids, lengths, completions, truncated, values)

    def _assembled(self, ids, lengths, completions, truncated, values) -> Batch:
        """Return a training batch of R rows from prompts `ids` (R, P), their lengths (R,), R completions, whether each
        of them has no end (R,), and rewards (R, K).
        """
        rows, group = len(ids), self._options.group_size
        # One position more than a row: the targets are the tokens shifted left by one.
        tokens = np.full((rows, self._length + 1), self._dataset.tokenizer.pad_id, np.int32)
        weights = np.zeros((rows, self._length + 1), np.float32)
        for row, (length, new) in enumerate(zip(lengths, completions, strict=True)):
            tokens[row, :length] = ids[row, :length]
            tokens[row, length : length + len(new)] = new
            weights[row, length : length + len(new)] = 1.0
        reward = self.rewards.total(values)
        groups = reward.reshape(-1, group)
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": weights[:, 1:],
            "lengths": (lengths + [len(new) - 1 for new in completions]).astype(np.int32),
            "advantages": advantages(groups, self._options.normalization != "dr_grpo").reshape(-1),
            "rewards": values.astype(np.float32),
            "reward": reward.astype(np.float32),
            "reward_std": np.repeat(groups.std(1, ddof=1), group).astype(np.float32),
            "equal_rewards": np.repeat(equal_rewards(groups), group).astype(np.float32),
            "truncated": truncated.astype(np.float32),
        }

    def _log_probs(self, state: TrainState, batch: Batch) -> np.ndarray:
        """Return the log-probabilities (R, T) of the targets under the policy that wrote them."""
        names = ("tokens", "targets", "lengths")
        with jax.set_mesh(self._placement.mesh):
            placed = place_batch({name: batch[name] for name in names}, self._placement.mesh)
            return np.asarray(jax.device_get(self._score(state.params, state.base, placed)))


def _sample(model, params, prompts, step, choice, ends, *, seed, limit, cache_slots, new_slots) -> DecodeResult:
    """Sample a completion of each prompt; row b of step n has the key fold_in(fold_in(key(seed), n), ...), b)."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), _SAMPLING)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(prompts.lengths.shape[0]))
    room = {"cache_slots": cache_slots, "new_slots": new_slots}
    return decode(model, params, prompts, None, keys, choice, ends, jnp.int32(limit), **room)


def _log_probs(recipe, model, trained, base, batch):
    function = functools.partial(token_scores, temperature=recipe.grpo.temperature)
    inputs, params = TASKS[recipe.task].inputs(model.config, batch), model_params(recipe, trained, base)
    tokens = recipe.training.loss_tokens
    return token_values(function, model, params, inputs, batch["targets"], tokens=tokens, deterministic=True)[0][0]


def completed_ids(result: DecodeResult, limit: int) -> tuple[list[list[int]], np.ndarray]:
    """Return the new tokens of each row with their end token, and whether it is truncated, i.e. has no end token."""
    counts = np.asarray(result.counts)
    # A row that ended has its end token after the counted ones.
    return [row[: min(n + 1, limit)].tolist() for row, n in zip(result.tokens, counts, strict=True)], counts >= limit


def make_source(
    recipe: Recipe, dataset: Dataset, model: nn.Module, placement: Placement, reward_model: RewardModel | None
) -> Supervision | Rollouts:
    """Return the source of the batches of a recipe. Raises the errors of `Rollouts`."""
    if recipe.grpo is None:
        return Supervision(recipe, dataset, placement)
    return Rollouts(recipe, dataset, model, placement, Rewards(recipe.grpo, reward_model))


def check_prompts(recipe: Recipe, dataset: PromptDataset, rewards: Rewards) -> None:
    """Raise ConfigError unless every reward takes the columns of every prompt, and completions fit the model."""
    seen = set()
    for split in dataset.splits:
        for prompt in dataset.prompts_of(split):
            if (columns := frozenset(prompt.columns)) not in seen:
                seen.add(columns)
                rewards.check(prompt)
    model, new = recipe.model, recipe.grpo.max_new_tokens
    if model.max_length is not None and dataset.longest + new > model.max_length:
        raise ConfigError(
            f"grpo.max_new_tokens ({new}) and the longest prompt ({dataset.longest} tokens) must be together at most "
            f"model.position.max_length ({model.max_length}), the rows of the position table. Lower one of them."
        )


def _padded(tokens: np.ndarray, width: int) -> np.ndarray:
    return np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), mode="edge")
