"""Recipes, the training step and loop, checkpoints and metrics.

`train` runs a recipe; `load_run` reads what it left. Each is imported when it is asked for: a recipe file needs neither
Orbax nor matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer.training._chips import *  # noqa: F403
    from transformer.training._loop import *  # noqa: F403
    from transformer.training._overrides import *  # noqa: F403
    from transformer.training._parallel import *  # noqa: F403
    from transformer.training._recipe import *  # noqa: F403
    from transformer.training._runs import *  # noqa: F403
    from transformer.training._settings import *  # noqa: F403
    from transformer.training._translating import *  # noqa: F403
    from transformer.training.lora import *  # noqa: F403

_EXPORTS = {
    "_chips": ("peak_flops",),
    "_loop": ("train",),
    "_overrides": ("find_recipe", "load_recipe_file", "override"),
    "_parallel": ("place",),
    "_recipe": (
        "Recipe",
        "build_model",
        "difference",
        "from_json",
        "load_recipe",
        "to_json",
        "with_vocabulary",
    ),
    "_runs": (
        "Run",
        "load_run",
    ),
    "_settings": (
        "CheckpointConfig",
        "EvaluationConfig",
        "LoggingConfig",
        "OptimizerConfig",
        "TrainingConfig",
    ),
    "_translating": (
        "Translation",
        "corpus_score",
    ),
    "lora": ("LoRA",),
}
"""file -> the public names that it defines"""

_MODULES = ("lora",)

__all__ = sorted([*_MODULES, *(name for names in _EXPORTS.values() for name in names)])


def __getattr__(name: str) -> Any:
    """Imports the file of a public name when the name is asked for."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
