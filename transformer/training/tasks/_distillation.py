"""Knowledge distillation: a student learns the predictions of a teacher, a trained model with the same tokenizer.

Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", arXiv 1503.02531. The teacher runs inside the
training step, with frozen parameters that are sharded like the student's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.config._checks import ConfigError, check_positive, check_whole
from transformer.config._model import TransformerConfig
from transformer.nn._axes import Array, Float

TEACHER_HIDDEN = "teacher_hidden"
"""name of the teacher's hidden states (B, T, D) in a batch"""


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Options of distillation; the loss is (1 - weight) temperature^2 KL(teacher || student) + weight x cross-entropy.

    Raises:
        ConfigError: a temperature that is not above 0, a top_k below 1, or a weight outside 0 to 1.
    """

    teacher: str = ""
    """the trained model: a directory of weights, a name on the Hugging Face Hub, or the workdir of a run"""
    temperature: float = 1.0
    """divisor of the logits of both models: above 1, the unlikely tokens count more"""
    top_k: int | None = None
    """learn only the teacher's k most likely tokens, with probabilities that add up to 1 (None: all tokens)"""
    weight: float = 0.0
    """weight of the cross-entropy with the true tokens, from 0 to 1; the rest is the weight of the teacher"""
    model: TransformerConfig | None = None
    """model config of the teacher; set by training"""
    fingerprint: str | None = None
    """SHA-256 of the teacher's parameters; set by training"""

    def __post_init__(self):
        check_positive(self, "temperature")
        check_whole(self, "top_k")
        if not isinstance(self.weight, int | float) or not 0 <= self.weight < 1:
            raise ConfigError(
                f"distill.weight must be at least 0 and below 1, got {self.weight!r}: 1 leaves nothing of the teacher."
            )


def divergence(
    student: Float[Array, "*batch V"],
    teacher: Float[Array, "*batch V"],
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Float[Array, "*batch"]:
    """Compute temperature^2 KL(p || q) in nats, in float32, where p is the teacher's distribution, and q the student's.

    The temperature is tau in p = softmax(teacher / tau) and q = softmax(student / tau). `top_k`: keep the k largest
    probabilities of the teacher, divided by their sum.
    """
    log_q = jax.nn.log_softmax(student.astype(jnp.float32) / temperature, axis=-1)
    teacher = teacher.astype(jnp.float32) / temperature
    if top_k is not None and top_k < teacher.shape[-1]:
        # The k-th largest logit is the limit, and smaller ones get probability 0. Equal logits at the limit are all
        # kept. A comparison keeps the vocabulary sharded; a gather of k entries would not.
        limit = jax.lax.top_k(teacher, top_k)[0][..., -1:]
        teacher = jnp.where(teacher >= limit, teacher, -jnp.inf)
    log_p = jax.nn.log_softmax(teacher, axis=-1)
    p = jnp.exp(log_p)
    # KL(p || q) = sum_v p_v (log p_v - log q_v), where 0 log 0 = 0. The factor tau^2 keeps the size of the gradients,
    # which are proportional to 1 / tau^2 (Hinton et al. 2015, section 2).
    terms = jnp.where(p > 0, p * (jnp.where(p > 0, log_p, 0.0) - log_q), 0.0)
    return temperature**2 * terms.sum(-1)


@dataclass(frozen=True)
class Teaching:
    """A teacher with its parameters, inside the training step."""

    model: nn.Module
    params: PyTree
    options: Distill

    def with_hidden(self, task: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with the teacher's hidden states (B, T, D), computed without dropout."""
        variables = {"params": self.params}
        hidden, *_ = task.forward(self.model, variables, batch, deterministic=True, method=type(self.model).run_stacks)
        return {**batch, TEACHER_HIDDEN: jax.lax.stop_gradient(hidden)}

    def loss(self, hard: Array, logits: Float[Array, "B T V"], batch: Mapping[str, Any]) -> Array:
        """Return the weighted sum of `hard`, the sum of the cross-entropies, and the divergences from the teacher."""
        options, weights = self.options, batch["weights"]
        variables = {"params": self.model.head_parameters(self.params)}
        teacher = self.model.apply(variables, batch[TEACHER_HIDDEN], method=type(self.model).head)
        soft = divergence(logits, jax.lax.stop_gradient(teacher), options.temperature, options.top_k)
        soft = jnp.where(weights > 0, soft * weights, 0.0).sum()
        return (1.0 - options.weight) * soft + options.weight * hard
