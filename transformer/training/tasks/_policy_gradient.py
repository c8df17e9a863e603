"""Group relative policy optimization (GRPO; Shao et al. 2024, arXiv 2402.03300, section 4.1), as pure functions.

For a prompt q, the policy pi_old writes a group of G completions o_1 ... o_G with the rewards r_1 ... r_G. The loss of
the policy pi is (equation 3, with the clipped ratio of PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7)

    ratio_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)
    loss_it  = -min(ratio_it A_i, clip(ratio_it, 1 - clip, 1 + clip) A_i) + beta KL_it
    loss     = 1/G sum_i 1/|o_i| sum_t loss_it

The advantage A_i of a completion compares its reward with those of the group, so that no critic is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError, check_choice, check_positive, check_whole
from transformer.nn._axes import Array, Float, Int
from transformer.training.tasks._log_probabilities import chosen_log_probabilities
from transformer.training.tasks._losses import Batch, Scalar

Normalization = Literal["grpo", "dapo", "dr_grpo"]

EPSILON = 1e-4
"""added to the standard deviation of the rewards of a group, as in TRL"""


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Options of group relative policy optimization (Shao et al. 2024, arXiv 2402.03300).

    Raises:
        ConfigError: a number out of range, or weights whose number is not that of the rewards.
    """

    rewards: tuple[str, ...] = ()
    """reward functions, "module:function" or "file.py:function";
    each is called as reward(prompt, completion, **columns) with the other columns of the prompt's row, and returns a
    number"""
    reward_weights: tuple[float, ...] = ()
    """weight of each reward, and last of the reward model; empty: all 1"""
    reward_model: str | None = None
    """directory or name of a classifier whose probability of reward_class is a further reward"""
    reward_class: str | None = None
    """class of reward_model; None: its last class"""
    group_size: int = 8
    """completions per prompt, G"""
    max_new_tokens: int = 64
    """maximum length of a completion in tokens; a longer one is truncated"""
    temperature: float = 1.0
    """temperature of sampling; the loss uses the probabilities at this temperature"""
    top_k: int | None = None
    """sample from the k most probable tokens; None: from all"""
    beta: float = 0.04
    """weight of the KL divergence from the reference model, the model before training; 0: no reference model"""
    clip: float = 0.2
    """the ratio of probabilities of new and old policy is clipped to 1 - clip ... 1 + clip"""
    clip_high: float | None = None
    """upper limit 1 + clip_high of the ratio (DAPO: 0.28); None: 1 + clip"""
    epochs: int = 1
    """training steps on each set of completions"""
    normalization: Normalization = "grpo"
    """mean of the loss:
    grpo: over the tokens of each completion, then over completions;
    dapo: over all tokens (Yu et al. 2025, arXiv 2503.14476);
    dr_grpo: sum over tokens, divided by completions x max_new_tokens, with advantages that are not divided by the
    standard deviation (Liu et al. 2025, arXiv 2503.20783)"""

    section = "grpo"

    def __post_init__(self):
        check_choice("grpo.normalization", self.normalization, Normalization.__args__)
        check_whole(self, "max_new_tokens", "epochs", "top_k")
        check_whole(self, "group_size", least=2)
        check_positive(self, "temperature", "clip", "clip_high")
        if not (isinstance(self.beta, int | float) and 0 <= self.beta < math.inf):
            raise ConfigError(f"grpo.beta must be a number of at least 0, got {self.beta!r}. Use 0 for no KL term.")
        count = len(self.rewards) + (self.reward_model is not None)
        if self.reward_weights and len(self.reward_weights) != count:
            raise ConfigError(
                f"grpo.reward_weights must have one number for each of the {count} rewards, got "
                f"{len(self.reward_weights)}. Change one of the two."
            )
        if not all(isinstance(weight, int | float) and math.isfinite(weight) for weight in self.reward_weights):
            raise ConfigError(f"grpo.reward_weights must be finite numbers, got {self.reward_weights}.")

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each reward."""
        return self.reward_weights or (1.0,) * (len(self.rewards) + (self.reward_model is not None))

    @property
    def highest(self) -> float:
        """Upper limit of the ratio, minus 1."""
        return self.clip if self.clip_high is None else self.clip_high


def reward_names(options: GRPO) -> tuple[str, ...]:
    """Return the names of the rewards in the metrics: those of the functions, numbered if they are not unique."""
    names = [name.rpartition(":")[2] for name in options.rewards]
    names += ["reward_model"] * (options.reward_model is not None)
    return tuple(name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names, 1))


def advantages(rewards: np.ndarray, scale: bool = True) -> np.ndarray:
    """Compute the advantages of completions (section 4.1.2 of the paper): (reward - mean) / (std + epsilon).

    Mean and standard deviation are those of the group, with G - 1 in the denominator of the variance as in TRL. If all
    rewards of a group are equal, its advantages are 0. Rewards and results (float32) are (P, G) for G completions of
    each of P prompts. Without `scale`, they are not divided.
    """
    rewards = np.asarray(rewards, np.float64)
    centered = rewards - rewards.mean(1, keepdims=True)
    # Without this line, the rounding error of the mean would become an advantage.
    centered = np.where(equal_rewards(rewards)[:, None], 0.0, centered)
    return (centered / (rewards.std(1, ddof=1, keepdims=True) + EPSILON) if scale else centered).astype(np.float32)


def equal_rewards(rewards: np.ndarray) -> np.ndarray:
    """Return whether all rewards of a group are equal, (P,), for rewards (P, G)."""
    return (rewards == rewards[:, :1]).all(1)


def token_scores(
    logits: Float[Array, "*batch V"], targets: Int[Array, "*batch"], temperature: float = 1.0
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Compute the log-probability of each target, and the entropy of softmax(logits / temperature), in nats and
    float32.
    """
    logits = logits.astype(jnp.float32) / temperature
    # -sum_v p_v ln p_v = ln Z - sum_v p_v z_v; no gradient flows through the entropy, which is only reported.
    fixed = jax.lax.stop_gradient(logits)
    log_z = jax.nn.logsumexp(fixed, axis=-1, keepdims=True)
    entropy = log_z.squeeze(-1) - (jnp.exp(fixed - log_z) * fixed).sum(-1)
    return chosen_log_probabilities(logits, targets), entropy


def policy_loss(
    log_probs: Float[Array, "B T"], batch: Batch, options: GRPO
) -> tuple[Scalar, Scalar, dict[str, Scalar]]:
    """Compute the loss of the module's docstring: sum, weight (their quotient is the loss), and sums over tokens.

    These are `tokens`, their number, `clipped`, the number of those whose ratio is clipped, and `kl`, if beta is not 0.
    The batch has `weights` (B, T), 1 for the tokens of the completion and 0 for all others; `advantages` (B,);
    `reference` (B, T), log-probabilities under the reference model, if beta is not 0; `old` (B, T), log-probabilities
    under the policy that wrote the completions. Without `old`, it is the policy itself.
    """
    mask = batch["weights"].astype(jnp.float32)
    advantage = batch["advantages"][:, None]
    # `where`, not a product alone: a masked position may hold any value, also one whose exponential is infinite.
    log_probs = jnp.where(mask > 0, log_probs, 0.0)
    old = jnp.where(mask > 0, batch["old"], 0.0) if "old" in batch else jax.lax.stop_gradient(log_probs)
    ratio = jnp.exp(log_probs - old)
    clipped = jnp.clip(ratio, 1 - options.clip, 1 + options.highest)
    # The minimum removes the gain of a larger step: above 1 + clip for A > 0, and below 1 - clip for A < 0.
    loss = -jnp.minimum(ratio * advantage, clipped * advantage)
    # The clipped ratio, which has no gradient, is the smaller one.
    outside = jnp.where(advantage > 0, ratio > 1 + options.highest, (ratio < 1 - options.clip) & (advantage < 0))
    measures = {"tokens": mask.sum(), "clipped": (outside * mask).sum()}
    if options.beta:
        # The estimator k3 (equation 4; Schulman 2020): with d = ln(pi_ref / pi), e^d - d - 1 >= 0, since e^d >= 1 + d.
        # Under pi its mean is KL(pi || pi_ref), because pi_ref / pi has the mean 1.
        difference = jnp.where(mask > 0, batch["reference"], 0.0) - log_probs
        kl = jnp.exp(difference) - difference - 1
        loss = loss + options.beta * kl
        measures["kl"] = (kl * mask).sum()
    total, weight = _normalized(loss, mask, options)
    return total, weight, measures


def row_weights(mask: Float[Array, "B T"], options: GRPO) -> Float[Array, " B"]:
    """Return the weight (B,) of each row for `options.normalization`, which depends on the row alone."""
    lengths = mask.sum(1)
    if options.normalization == "dapo":
        return lengths
    rows = (lengths > 0).astype(jnp.float32)
    return rows * options.max_new_tokens if options.normalization == "dr_grpo" else rows


def _normalized(loss: Float[Array, "B T"], mask: Float[Array, "B T"], options: GRPO) -> tuple[Scalar, Scalar]:
    """Return the sum of the loss of all tokens, weighted according to `options.normalization`, and its weight."""
    loss = loss * mask
    if options.normalization not in ("dapo", "dr_grpo"):  # these add up all tokens; the first form takes means of rows
        loss = loss / jnp.maximum(mask.sum(1, keepdims=True), 1.0)  # |o_i|, (B, 1)
    return loss.sum(), row_weights(mask, options).sum()
