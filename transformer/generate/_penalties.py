"""Penalties for tokens that a text already contains, and log-probabilities of sampled tokens: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Bool, Float, Int, Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Penalties:
    """The penalties of a `Sampling` as arguments of a compiled program."""

    repetition: Leaf
    """(), divisor of positive logits, factor of negative ones; 1: no penalty"""
    presence: Leaf
    """(), subtracted from the logits of tokens that were generated"""
    frequency: Leaf
    """(), subtracted once for each time that a token was generated"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """Tokens that the rows contain so far."""

    in_prompt: Leaf
    """(B, V), whether the prompt has the token"""
    counts: Leaf
    """(B, V), how many times the token was generated"""

    @staticmethod
    def of(prompts: Int[Array, "B T"], lengths: Int[Array, " B"], vocab_size: int) -> History:
        """Return the history of rows with a prompt and no generated token; entries past `lengths` are padding."""
        rows = jnp.arange(prompts.shape[0])[:, None]
        is_token = jnp.arange(prompts.shape[1])[None, :] < lengths[:, None]
        # Padding goes to a column past the vocabulary, which mode="drop" ignores.
        columns = jnp.where(is_token, prompts, vocab_size)
        blank = jnp.zeros((prompts.shape[0], vocab_size), bool)
        return History(blank.at[rows, columns].set(True, mode="drop"), jnp.zeros(blank.shape, jnp.int32))

    def add(self, tokens: Int[Array, " B"], running: Bool[Array, " B"]) -> History:
        """Return the history with one more generated token in each running row."""
        columns = jnp.where(running, tokens, self.counts.shape[1])
        counts = self.counts.at[jnp.arange(tokens.shape[0]), columns].add(1, mode="drop")
        return History(self.in_prompt, counts)


def without_repetition(
    scores: Float[Array, "... V"], repeated: Bool[Array, "... V"], penalty: Float[Array, "..."]
) -> Float[Array, "... V"]:
    """Return scores with lower ones for repeated tokens (Keskar et al. 2019, arXiv 1909.05858, section 4.1).

    Args:
        scores: (..., V), logits or log-probabilities.
        repeated: (..., V), whether the text contains the token.
        penalty: divisor of positive scores and factor of negative ones; dividing a negative one would raise it.
    """
    lowered = jnp.where(scores > 0, scores / penalty, scores * penalty)
    return jnp.where(repeated, lowered, scores)


def penalized(logits: Float[Array, "B V"], history: History, penalties: Penalties) -> Float[Array, "B V"]:
    """Return the logits after the penalties.

    The repetition penalty (`without_repetition`) is for tokens of the prompt and for generated tokens. The presence and
    frequency penalties are for generated tokens only, and are added to the logits: l - frequency count - presence
    (count > 0).
    """
    repeated = history.in_prompt | (history.counts > 0)
    logits = without_repetition(logits, repeated, penalties.repetition)
    return logits - penalties.frequency * history.counts - penalties.presence * (history.counts > 0)


def log_probabilities(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return the log-probability of each token under the model, before penalties, temperature and filters."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
