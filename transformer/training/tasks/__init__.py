"""Training tasks: one class for each, with its losses, the options of these, and its evaluation."""

from transformer.config._lazy import lazy_exports

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
