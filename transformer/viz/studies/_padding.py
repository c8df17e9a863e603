"""What share of a batch is padding: padded to the longest of all, or of the batch, sorted into buckets, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer.data._buckets import bucket_bounds
from transformer.data._local_files import read_lines
from transformer.data.kinds._number_words import training_numbers, words

SEQUENCES = 4_096
"""number words that are drawn; of a longer file, so many lines are drawn times four"""
BATCH_ROWS = 64
"""rows as long as the longest sequence that one batch holds: no strategy may use more places at once"""
BUCKETS = 8
"""widths at most that buckets have"""


@dataclass(frozen=True, kw_only=True)
class PaddingRow:
    """One pass over all sequences with one strategy."""

    strategy: str
    """how rows are made"""
    batches: int
    """of at most as many places as `batch_rows` rows of the longest sequence"""
    rows: int
    """in all batches"""
    places: int
    """tokens and padding together"""
    padding: int
    """places without a token"""
    share: float
    """padding / places"""
    shapes: int
    """widths of batches, each compiled once"""


def padding_study(
    lengths: Sequence[int] | np.ndarray, batch_rows: int = BATCH_ROWS, buckets: int = BUCKETS, seed: int = 0
) -> tuple[PaddingRow, ...]:
    """A row for each strategy. Rows that would fill up the last batch of a width are not counted.

    Raises:
        ValueError: no sequence, or an empty one.
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
        raise ValueError(
            f"lengths must be one whole number of at least 1 for each of at least 1 sequence, got shape "
            f"{lengths.shape}{f' with a least of {lengths.min()}' if lengths.size else ''}. Leave empty sequences out."
        )
    shuffled = np.random.default_rng(seed).permutation(lengths)
    longest = int(lengths.max())
    tokens = int(lengths.sum())
    in_batches = np.array_split(shuffled, np.arange(batch_rows, len(shuffled), batch_rows))
    bounds = bucket_bounds(lengths, buckets)
    in_buckets = np.bincount(np.searchsorted(bounds, lengths), minlength=len(bounds))
    packed = pack(shuffled, longest, batch_rows)

    # (rows, width) of every batch
    strategies = {
        "longest of all": [(len(batch), longest) for batch in in_batches],
        "longest of the batch": [(len(batch), int(batch.max())) for batch in in_batches],
        "length buckets": [
            (rows, int(bound))
            for bound, count in zip(bounds, in_buckets, strict=True)
            for rows in _split(int(count), batch_rows * longest // int(bound))
        ],
        "packing": [(rows, longest) for rows in _split(len(packed), batch_rows)],
    }
    return tuple(_row(strategy, batches, tokens) for strategy, batches in strategies.items())


def pack(lengths: np.ndarray, row_length: int, rows_at_once: int = BATCH_ROWS) -> np.ndarray:
    """Which sequence each place of the packed rows holds, (rows, row_length): 1 for the first; 0 is padding.

    First fit among `rows_at_once` open rows, by Grain; `Mask.segments` keeps the sequences of a row apart.
    """
    import grain
    from grain.experimental import FirstFitPackIterDataset

    def sequence(number: int) -> dict[str, np.ndarray]:
        return {"sequence": np.full(lengths[number], number + 1, np.int32)}

    numbers = grain.MapDataset.range(len(lengths)).map(sequence)
    rows = FirstFitPackIterDataset(
        numbers.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={"sequence": row_length},
        num_packing_bins=rows_at_once,
        shuffle_bins=False,
    )
    return np.array([row["sequence"] for row in rows])


def number_word_lengths(count: int = SEQUENCES) -> np.ndarray:
    """Characters of `count` English numbers below a million in words, drawn as the training numbers are."""
    return np.array([len(words(number, "en")) for number in training_numbers(6, count)])


def text_lengths(path: Path, most: int = 4 * SEQUENCES, seed: int = 0) -> np.ndarray:
    """Words of each line of a UTF-8 file that has any; of more than `most` lines, so many drawn.

    FileNotFoundError if there is no file; ValueError if it is empty or no UTF-8 text.
    """
    lengths = np.array([len(line.split()) for line in read_lines(str(path))])
    lengths = lengths[lengths > 0]
    return lengths if len(lengths) <= most else np.random.default_rng(seed).permutation(lengths)[:most]


def _split(count: int, most: int) -> list[int]:
    """`count` in parts of `most`, the last with what is left."""
    return [min(most, count - start) for start in range(0, count, most)]


def _row(strategy: str, batches: list[tuple[int, int]], tokens: int) -> PaddingRow:
    places = sum(rows * width for rows, width in batches)
    return PaddingRow(
        strategy=strategy,
        batches=len(batches),
        rows=sum(rows for rows, _ in batches),
        places=places,
        padding=places - tokens,
        share=(places - tokens) / places,
        shapes=len({width for _, width in batches}),
    )
