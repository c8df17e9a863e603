"""Where the batches of training come from: the data, or completions that the model writes."""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from transformer.data._dataset import Batch, Dataset
from transformer.training._parallel import Placement
from transformer.training._recipe import Recipe
from transformer.training._rollouts import Rollouts
from transformer.training._state import TrainState
from transformer.training.tasks._rewards import RewardModel, Rewards
from transformer.training.workdir._journal import Journal


class Supervision:
    """Training batches of data with targets. `Rollouts` has the same methods, for data without."""

    rewards: Rewards | None = None

    def __init__(self, recipe: Recipe, dataset: Dataset, placement: Placement):
        self._seed, self._dataset, self._rows = recipe.training.seed, dataset, placement.rows

    def start(self) -> Any:
        """Return the iterator over the batches, with the rows of this process."""
        return self._dataset.train_batches(self._seed, self._rows)

    def batch(self, state: TrainState, step: int, batches: Any) -> Batch:
        """Return the batch for the next step.

        Args:
            state: state before the step.
            step: number of steps done.
            batches: result of `start`.
        """
        return next(batches)

    def record(self, journal: Journal, seconds: float) -> None:
        """Record in the journal that the last batch took so many seconds."""
        journal.fed(seconds)

    def unfinished(self, step: int) -> bool:
        """Return whether the run can't stop before the next step."""
        return False


def make_source(
    recipe: Recipe, dataset: Dataset, model: nn.Module, placement: Placement, reward_model: RewardModel | None
) -> Supervision | Rollouts:
    """Return the source of the batches of a recipe. Raises the errors of `Rollouts`."""
    if recipe.grpo is None:
        return Supervision(recipe, dataset, placement)
    return Rollouts(recipe, dataset, model, placement, Rewards(recipe.grpo, reward_model))
