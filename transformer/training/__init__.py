"""Recipes, the training step and loop, checkpoints and metrics.

`transformer.training.loop.train` runs a recipe; `transformer.training.runs.load_run` reads what it left. They are not
imported here: a recipe file needs neither Orbax nor matplotlib.
"""

from transformer.training.recipe import (
    Recipe,
    build_model,
    difference,
    from_json,
    load_recipe,
    to_json,
)
from transformer.training.settings import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
)

__all__ = [
    "CheckpointConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "OptimizerConfig",
    "Recipe",
    "TrainingConfig",
    "build_model",
    "difference",
    "from_json",
    "load_recipe",
    "to_json",
]
