"""A classifier as a reward model for training with rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformer.config._checks import ConfigError, nearest
from transformer.inference._classify import classify
from transformer.inference._load import load_model

if TYPE_CHECKING:
    from transformer.training._recipe import Recipe
    from transformer.training.tasks._rewards import RewardModel


def reward_model(recipe: Recipe) -> RewardModel | None:
    """Load the classifier `grpo.reward_model` of a recipe; None if the recipe has none.

    Returns:
        A function from texts, each a prompt with a completion, to their probabilities of `grpo.reward_class`.

    Raises:
        ConfigError: the model is not a classifier, or has no such class.
    """
    options = recipe.grpo
    if options is None or options.reward_model is None:
        return None
    opened = load_model(options.reward_model)
    labels = list(classify(opened, ["a"])[0].probabilities)  # now, before training: it must be a classifier
    wanted = labels[-1] if options.reward_class is None else options.reward_class
    if wanted not in labels:
        raise ConfigError(
            f"{options.reward_model} has no class {wanted!r} (grpo.reward_class).{nearest(wanted, labels)} It has: "
            f"{', '.join(labels)}. Name one of them."
        )

    def rewards(texts: Sequence[str]) -> list[float]:
        return [found.probabilities[wanted] for found in classify(opened, texts)]

    return rewards
