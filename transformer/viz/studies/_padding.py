"""Fraction of padding in batches: padded to the longest sequence of all or of the batch, bucketed by length, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer.config._local_paths import local_path
from transformer.data._buckets import bucket_bounds
from transformer.data.files._texts import read_lines
from transformer.data.kinds._number_words import training_numbers, words

SEQUENCES = 4_096
"""number of number words that are sampled; from a file, at most four times as many lines are sampled"""
BATCH_ROWS = 64
"""rows per batch at the length of the longest sequence; every strategy has at most this many positions"""
BUCKETS = 8
"""maximum number of length buckets"""


@dataclass(frozen=True, kw_only=True)
class PaddingRow:
    """One pass over all sequences with one strategy."""

    strategy: str
    """name of the batching strategy"""
    batches: int
    """number of batches; each has at most as many positions as `batch_rows` rows of the longest sequence"""
    rows: int
    """number of rows in all batches"""
    places: int
    """number of positions: tokens and padding"""
    padding: int
    """number of positions without a token"""
    share: float
    """padding / positions"""
    shapes: int
    """number of distinct batch widths, each of which is compiled once"""


def padding_study(
    lengths: Sequence[int] | np.ndarray, batch_rows: int = BATCH_ROWS, buckets: int = BUCKETS, seed: int = 0
) -> tuple[PaddingRow, ...]:
    """Return one row per strategy. A last batch that is not full is counted without empty rows.

    Args:
        lengths: lengths of the sequences.
        batch_rows: rows per batch at the length of the longest sequence.
        buckets: maximum number of length buckets.
        seed: random seed of the order of the sequences.

    Raises:
        ValueError: there is no sequence, or a sequence is empty.
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
        raise ValueError(
            f"lengths must be a vector of at least one integer, each at least 1, got shape {lengths.shape}"
            f"{f' with a minimum of {lengths.min()}' if lengths.size else ''}. Remove empty sequences."
        )
    shuffled = np.random.default_rng(seed).permutation(lengths)
    longest = int(lengths.max())
    tokens = int(lengths.sum())
    in_batches = np.array_split(shuffled, np.arange(batch_rows, len(shuffled), batch_rows))
    bounds = bucket_bounds(lengths, buckets)
    in_buckets = np.bincount(np.searchsorted(bounds, lengths), minlength=len(bounds))
    packed = pack(shuffled, longest, batch_rows)

    # (rows, width) of every batch; a narrower bucket has more rows, so that all batches have about equal size.
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
    """Pack sequences into rows; return the number of the sequence at each position, (rows, row_length).

    The first sequence has number 1; 0 is padding. Grain uses first fit among `rows_at_once` open rows. `Mask.segments`
    separates the sequences of a row in attention.
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
    """Return the lengths, in characters, of `count` English number words below a million, sampled as for training."""
    return np.array([len(words(number, "en")) for number in training_numbers(6, count)])


def text_lengths(path: Path, most: int = 4 * SEQUENCES, seed: int = 0) -> np.ndarray:
    """Return the number of words of each non-empty line of a UTF-8 file; sample `most` lines if there are more.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty or not UTF-8 text.
    """
    lengths = np.array([len(line.split()) for line in read_lines(str(local_path(path, "path")))])
    lengths = lengths[lengths > 0]
    return lengths if len(lengths) <= most else np.random.default_rng(seed).permutation(lengths)[:most]


def _split(count: int, most: int) -> list[int]:
    """Split `count` into parts of `most`; the last part is the remainder."""
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
