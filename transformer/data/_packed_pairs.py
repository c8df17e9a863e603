"""Sequence packing: put several pairs into one row, separated by segment ids, to reduce padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from transformer.data._dataset import IN_MEMORY, Batch, Ragged
from transformer.data.tokenizers._base import Tokenizer

if TYPE_CHECKING:
    import grain


def packed_batches(
    order: grain.MapDataset,
    sources: Ragged,
    targets: Ragged,
    tokenizer: Tokenizer,
    *,
    row_length: int,
    rows: int,
    own: Callable[[int], np.ndarray],
) -> grain.IterDataset:
    """Pack pairs into batches of `rows` rows of `row_length` tokens per side.

    Each pair goes into the first row with enough free space on both sides (first-fit packing, by Grain).

    Besides source, tokens, targets and weights, a batch has `segment_ids` and `positions` (B, T) of the target, and
    `source_segment_ids` and `source_positions` (B, S). Segment ids count from 1 in each row, and 0 is padding;
    positions restart at 0 in each segment. Attention is restricted to tokens with equal segment ids.

    Args:
        order: indices of the pairs, in training order.
        sources: ids of the sources.
        targets: ids of the targets, each with the end token.
        tokenizer: has the ids of the begin and padding tokens.
        row_length: length of a row in tokens, the same for source and target.
        rows: number of rows of the global batch.
        own: function from the number of rows to the indices of the rows that this process needs.
    """
    import grain
    from grain.experimental import FirstFitPackIterDataset

    def pair(place: int) -> dict[str, np.ndarray]:
        target = targets.row(place)
        # Teacher forcing: the decoder reads the target shifted right by one, starting with the begin token.
        return {"source": sources.row(place), "targets": target, "tokens": np.r_[tokenizer.begin_id, target[:-1]]}

    def batch(packed: dict[str, np.ndarray]) -> Batch:
        packed = {name: array[own(rows)] for name, array in packed.items()}
        return {
            "source": packed["source"],
            "source_segment_ids": packed["source_segment_ids"],
            "source_positions": packed["source_positions"],
            "tokens": packed["tokens"],
            "segment_ids": packed["tokens_segment_ids"],
            "positions": packed["tokens_positions"],
            "targets": packed["targets"],
            "weights": (packed["tokens_segment_ids"] > 0).astype(np.float32),  # (B, T), 0 for padding
        }

    # The rows of a batch are the bins of the packer; a batch is complete when the next pair fits into none of them.
    # shuffle_bins=False keeps the order reproducible: the order of the pairs is shuffled already.
    sides = ("source", "targets", "tokens")
    packed = FirstFitPackIterDataset(
        order.map(pair).to_iter_dataset(grain.ReadOptions(**IN_MEMORY)),
        length_struct=dict.fromkeys(sides, row_length),
        num_packing_bins=rows,
        shuffle_bins=False,
        padding_struct=dict.fromkeys(sides, tokenizer.pad_id),
    )
    return packed.batch(rows).map(batch)
