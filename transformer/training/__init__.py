"""Recipes, the training step and loop, checkpoints and metrics.

`train` runs a recipe; `load_run` reads the resulting run. Names are imported lazily, on first access, so that a recipe
file imports neither Orbax nor matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.training._chips import *  # noqa: F403
    from transformer.training._loop import *  # noqa: F403
    from transformer.training._overrides import *  # noqa: F403
    from transformer.training._parallel import *  # noqa: F403
    from transformer.training._recipe import *  # noqa: F403
    from transformer.training._settings import *  # noqa: F403
    from transformer.training.lora import *  # noqa: F403
    from transformer.training.tasks._distillation import *  # noqa: F403
    from transformer.training.tasks._losses import *  # noqa: F403
    from transformer.training.tasks._policy_gradient import *  # noqa: F403
    from transformer.training.tasks._preference import *  # noqa: F403
    from transformer.training.tasks._rewards import *  # noqa: F403
    from transformer.training.tasks._translation import *  # noqa: F403
    from transformer.training.workdir._runs import *  # noqa: F403

_EXPORTS = {
    "_chips": ("peak_flops",),
    "tasks._distillation": ("Distill",),
    "_loop": ("train",),
    "tasks._losses": ("ctc_loss",),
    "_overrides": ("find_recipe", "load_recipe_file", "override"),
    "_parallel": ("place",),
    "tasks._policy_gradient": ("GRPO",),
    "tasks._preference": ("DPO",),
    "_recipe": ("Recipe", "build_model", "difference", "from_json", "load_recipe", "to_json", "with_vocabulary"),
    "tasks._rewards": ("exact_answer",),
    "workdir._runs": ("Run", "load_run"),
    "_settings": ("CheckpointConfig", "EvaluationConfig", "LoggingConfig", "OptimizerConfig", "TrainingConfig"),
    "tasks._translation": ("Translation", "corpus_score"),
    "lora": ("LoRA",),
}
"""module -> the public names that it defines"""

_MODULES = ("lora",)

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS, _MODULES)
