"""The masks of the slots: which tokens the constraint of each running text allows next."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from transformer.generate._constraints import Constraint, next_allowed
from transformer.generate._rows import RowMasks


class SlotMasks:
    """Asks the constraints of the running texts for the tokens that they allow, once per token.

    Args:
        slots: number of texts R.
        vocab_size: number of token ids V.
        suppressed: (S,), ids that are never generated.
    """

    def __init__(self, slots: int, vocab_size: int, suppressed: np.ndarray):
        self._suppressed = suppressed
        self._blank = RowMasks.blank(slots, vocab_size)

    def of(self, constraints: Mapping[int, Constraint]) -> tuple[RowMasks, dict[int, str]]:
        """Return the masks of a call that generates one token per text.

        Args:
            constraints: the constraint of each slot that has one, after all tokens of its text.

        Returns:
            The masks, and for each slot whose text can't be continued the reason.
        """
        if not constraints:
            return self._blank, {}
        masks = RowMasks(self._blank.constrained.copy(), self._blank.allowed.copy())
        failed = {}
        for slot, constraint in constraints.items():
            try:
                masks.allowed[slot] = next_allowed(constraint, self._suppressed)
                masks.constrained[slot] = True
            except ValueError as error:
                failed[slot] = str(error)
        return masks, failed
