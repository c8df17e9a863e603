"""Pack several pairs into one row, separated by segment ids, to reduce padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from transformer.data._dataset import IN_MEMORY, Batch, Ragged
from transformer.data._tokenizer import Tokenizer

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

    Pairs are taken in this `order` (of their indices); each goes into the first row with enough room (first fit, by
    Grain). Only the rows that `own` selects are returned.

    In addition to source, tokens, targets and weights, a batch has `segment_ids` and `positions` (B, T) of the target,
    and `source_segment_ids` and `source_positions` (B, S). Segments count from 1, padding is 0, and positions restart
    at 0 in each segment.
    """
    import grain
    from grain.experimental import FirstFitPackIterDataset

    def pair(place: int) -> dict[str, np.ndarray]:
        target = targets.row(place)
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
            "weights": (packed["tokens_segment_ids"] > 0).astype(np.float32),
        }

    sides = ("source", "targets", "tokens")
    packed = FirstFitPackIterDataset(
        order.map(pair).to_iter_dataset(grain.ReadOptions(**IN_MEMORY)),
        length_struct=dict.fromkeys(sides, row_length),
        num_packing_bins=rows,
        shuffle_bins=False,
        padding_struct=dict.fromkeys(sides, tokenizer.pad_id),
    )
    return packed.batch(rows).map(batch)
