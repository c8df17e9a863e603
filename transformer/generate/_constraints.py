"""Constraints on generated text: which tokens may come next, as bits that the device applies to the logits."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import Array, Float, Leaf

WORD = 32
"""number of tokens per word of a bit mask"""


@runtime_checkable
class Constraint(Protocol):
    """The state of one text under a constraint, such as a JSON schema. It is used for one text only."""

    vocab_size: int
    """number of token ids, that of the model"""
    end_ids: tuple[int, ...]
    """tokens that end the text where the constraint allows it"""

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next: (ceil(V / 32),) uint32, bit `i % 32` of word `i // 32` for token i."""
        ...

    def accept(self, token: int) -> None:
        """Append a token, which must be one of those that `allowed` returned."""
        ...


def only_allowed(logits: Float[Array, "B V"], allowed: Leaf) -> Float[Array, "B V"]:
    """Replace the logits of all tokens without a bit in `allowed` (ceil(V / 32),) by -inf.

    The bits are unpacked on the device: a vocabulary of 128k tokens needs 16 kB per step, not 512 kB of logits.
    """
    bits = (jnp.asarray(allowed)[:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, :]) & 1
    kept = bits.reshape(1, -1)[:, : logits.shape[1]] == 1
    return jnp.where(kept, logits, -jnp.inf)


def packed(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the bit mask of token ids: (ceil(V / 32),) uint32."""
    bits = np.zeros(-(-vocab_size // WORD) * WORD, bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
