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
    """Replace the logits of all tokens without a bit in `allowed` by -inf.

    The bits are uint32, of all rows together (ceil(V / 32),), or of each row (B, ceil(V / 32)). They are unpacked on
    the device: a vocabulary of 128k tokens needs 16 kB per row and step, not 512 kB of logits.
    """
    words = jnp.atleast_2d(jnp.asarray(allowed))  # (1 or B, W)
    bits = (words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None, :]) & 1
    kept = bits.reshape(len(words), -1)[:, : logits.shape[1]] == 1
    return jnp.where(kept, logits, -jnp.inf)


def next_allowed(constraint: Constraint, suppressed: np.ndarray | None) -> np.ndarray:
    """Return the tokens that a constraint allows, (ceil(V / 32),) uint32.

    Raises:
        ValueError: no token is left but `suppressed` ones (S,), which would look like logits that are NaN; or the
            constraint can't be continued.
    """
    allowed = constraint.allowed()
    left = allowed if suppressed is None else allowed & ~packed(suppressed, constraint.vocab_size)
    if not left.any():
        raise ValueError(
            "the constraint allows no token here that the sampling does not suppress. Remove Sampling.suppress, or "
            "change the constraint."
        )
    return allowed


def packed(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the bit mask of token ids: (ceil(V / 32),) uint32."""
    bits = np.zeros(-(-vocab_size // WORD) * WORD, bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
