"""Training tasks: one class for each, with its losses, the options of these, and its evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.training.tasks._distillation import *  # noqa: F403
    from transformer.training.tasks._losses import *  # noqa: F403
    from transformer.training.tasks._policy_gradient import *  # noqa: F403
    from transformer.training.tasks._preference import *  # noqa: F403
    from transformer.training.tasks._rewards import *  # noqa: F403
    from transformer.training.tasks._translation import *  # noqa: F403

_EXPORTS = {
    "_distillation": ("Distill",),
    "_losses": ("ctc_loss",),
    "_policy_gradient": ("GRPO",),
    "_preference": ("DPO",),
    "_rewards": ("exact_answer",),
    "_translation": ("Translation", "corpus_score"),
}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
