"""Sequences of tokens packed into rows of a fixed length: batches of conversations, separate documents, and pairs."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from transformer.data._dataset import IN_MEMORY, Batch, Ragged
from transformer.data.tokenizers._base import Tokenizer

if TYPE_CHECKING:
    import grain


def best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack items into rows: the longest first, each into the row with the least free space that it fits into.

    Best-fit decreasing (Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing
    algorithms") needs at most 11/9 of the smallest number of rows, plus one. Returns the items of each row, as indices;
    the order of rows and items depends on the lengths only, of which each is at most `row_length`.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free space, row) of each row, sorted
    for item in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect.bisect_left(free, (lengths[item], -1))
        if place < len(free):
            space, row = free.pop(place)
        else:
            space, row = row_length, len(rows)
            rows.append([])
        rows[row].append(item)
        if space > lengths[item]:
            bisect.insort(free, (space - lengths[item], row))
    return rows


class PackedRows:
    """Token sequences in rows of a fixed length, with their targets.

    A batch has `tokens`, `targets` and `weights` (B, T), and `segment_ids` and `positions` (B, T). Segment ids count
    from 1 in each row, and 0 is padding; positions restart at 0 in each segment. Attention is restricted to tokens with
    equal segment ids, so that a packed sequence has the same loss as alone in a row.

    A sequence has 2 to `row_length` + 1 ids: the model reads all but the last one, and predicts all but the first one.
    `trained` says for each id whether it counts in the loss as a target. With `pack`, a row has several sequences.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        trained: Sequence[Sequence[bool]],
        row_length: int,
        pad: int,
        *,
        pack: bool = True,
    ):
        self._ids, self._trained = Ragged(sequences), Ragged(trained)
        self._length, self._pad = row_length, pad
        places = (self._ids.lengths - 1).tolist()
        packed = best_fit(places, row_length) if pack else [[item] for item in range(len(places))]
        # By their first items, which are in the order of the data: the first rows are no sample of long sequences.
        self._rows = sorted(packed)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def arrays(self) -> list[np.ndarray]:
        """Everything that determines the batches, for a fingerprint."""
        return [self._ids.values, self._ids.lengths, self._trained.values]

    @property
    def tokens(self) -> int:
        """Number of tokens that the model reads."""
        return int((self._ids.lengths - 1).sum())

    @property
    def targets(self) -> int:
        """Number of targets that count in the loss."""
        return int(self._trained.values.sum() - self._trained.values[self._trained.starts].sum())

    @property
    def padding(self) -> float:
        """Share of the places of all rows that are padding."""
        return 1.0 - self.tokens / (len(self) * self._length)

    def assemble(self, rows: np.ndarray) -> Batch:
        """Return the batch of the rows with these indices."""
        chosen = [[(self._ids.row(item), self._trained.row(item)) for item in self._rows[row]] for row in rows]
        return packed_batch(chosen, self._length, self._pad)


def packed_batch(rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray | bool]]], row_length: int, pad: int) -> Batch:
    """Return the batch of rows of sequences, as `PackedRows` describes it: ids, and which (True: all) are trained."""
    shape = len(rows), row_length
    batch = {
        "tokens": np.full(shape, pad, np.int32),
        "targets": np.full(shape, pad, np.int32),
        "weights": np.zeros(shape, np.float32),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
    }
    for number, row in enumerate(rows):
        start = 0
        for segment, (ids, trained) in enumerate(row, 1):
            part = number, slice(start, start := start + len(ids) - 1)
            batch["tokens"][part] = ids[:-1]
            batch["targets"][part] = ids[1:]
            batch["weights"][part] = trained if isinstance(trained, bool) else trained[1:]
            batch["segment_ids"][part] = segment
            batch["positions"][part] = np.arange(len(ids) - 1)
    return batch


def chunks(ids: Sequence[int], row_length: int) -> list[Sequence[int]]:
    """Cut a document into sequences for `PackedRows`; together they contain every target once.

    The last token of a sequence is only a target, so it is also the first token of the next one.
    """
    return [
        part for start in range(0, len(ids) - 1, row_length) if len(part := ids[start : start + row_length + 1]) > 1
    ]


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
    `source_segment_ids` and `source_positions` (B, S), as in `PackedRows`. `order` has the indices of the pairs in
    training order; `own` is a function from the number of rows to the indices of the rows that this process needs.
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
