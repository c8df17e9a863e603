"""Losses that learn from preferences: of two responses to a prompt, one is chosen and the other rejected.

All of them compare the model pi with a frozen reference model, the model before training. The score of a response y to
a prompt x is log pi(y|x) - log pi_ref(y|x), in nats: how much more probable the response has become. The reward that
the model has learned is beta times this score (Rafailov et al. 2023, DPO, arXiv 2305.18290, equation 5, up to a term
that depends only on the prompt).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError, check_choice, check_positive
from transformer.nn._axes import Array, Float

PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "apo_zero"]


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Options of the loss of preferences (the task `dpo`).

    Raises:
        ConfigError: a beta that is not above 0, an unknown loss, or label smoothing out of range or for another loss.
    """

    beta: float = 0.1
    """strength of the pull towards the reference model: the higher, the less the model changes;
    for ipo, the regularization tau"""
    loss: PreferenceLoss = "sigmoid"
    """loss of a pair, where s is the difference of the two scores:
    sigmoid: -log sigmoid(beta s), the loss of DPO;
    ipo: (s - 1 / (2 beta))^2 with scores per token, which does not grow without limit;
    hinge: max(0, 1 - beta s);
    apo_zero: raises the chosen and lowers the rejected response, each relative to the reference model"""
    label_smoothing: float = 0.0
    """for sigmoid: assumed fraction of pairs whose two responses are swapped by mistake (conservative DPO)"""

    def __post_init__(self):
        check_positive(self, "beta")
        check_choice("dpo.loss", self.loss, PreferenceLoss.__args__)
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"dpo.label_smoothing must be at least 0 and below 0.5, got {self.label_smoothing}: with 0.5, the "
                f"pairs would say nothing. Use a smaller value."
            )
        if self.label_smoothing and self.loss != "sigmoid":
            raise ConfigError(
                f"dpo.label_smoothing ({self.label_smoothing}) is for dpo.loss sigmoid, got {self.loss}. Set it to 0."
            )


def preference_losses(
    chosen: Float[Array, "B"],
    rejected: Float[Array, "B"],
    chosen_lengths: Float[Array, "B"],
    rejected_lengths: Float[Array, "B"],
    options: DPO,
) -> Float[Array, "B"]:
    """Compute the loss of each pair, in float32.

    `chosen` are the scores of the chosen responses, log pi(y_w|x) - log pi_ref(y_w|x), `rejected` those of the rejected
    ones; lengths are in tokens.
    """
    chosen, rejected = chosen.astype(jnp.float32), rejected.astype(jnp.float32)
    beta, difference = options.beta, chosen - rejected
    if options.loss == "sigmoid":
        # Rafailov et al. 2023, arXiv 2305.18290, equation 7: -log sigmoid(beta (h_w - h_l)). With a probability e that
        # the labels are swapped, the expected loss is (1 - e) L(y_w, y_l) + e L(y_l, y_w) (Mitchell 2023, "A note on
        # DPO with noisy preferences", equation 3). log_sigmoid(x) = -log(1 + exp(-x)) does not overflow.
        right, swapped = jax.nn.log_sigmoid(beta * difference), jax.nn.log_sigmoid(-beta * difference)
        return -(1.0 - options.label_smoothing) * right - options.label_smoothing * swapped
    if options.loss == "ipo":
        # Azar et al. 2023, arXiv 2310.12036, equation 17: (h - 1 / (2 tau))^2. With sums over tokens the target
        # 1 / (2 tau) would mean less for long responses; so the scores are means over tokens, as in TRL, whose authors
        # agreed on this with those of the paper.
        difference = chosen / jnp.maximum(chosen_lengths, 1.0) - rejected / jnp.maximum(rejected_lengths, 1.0)
        return jnp.square(difference - 1.0 / (2.0 * beta))
    if options.loss == "hinge":
        # Zhao et al. 2023, SLiC, arXiv 2305.10425, equation 1, with the scores of DPO: max(0, 1 - beta (h_w - h_l)).
        return jax.nn.relu(1.0 - beta * difference)
    # D'Oosterlinck et al. 2024, APO, arXiv 2408.06266, equation 7: (1 - sigmoid(beta h_w)) + sigmoid(beta h_l). This is
    # the loss of KTO (Ethayarajh et al. 2024, arXiv 2402.01306, equation 8) of both responses with a reference point of
    # 0. KTO's own reference point is a mean over the batch, so that its loss would depend on the split of the batch.
    return jax.nn.sigmoid(-beta * chosen) + jax.nn.sigmoid(beta * rejected)
