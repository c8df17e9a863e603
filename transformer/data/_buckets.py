"""Batches of similar token counts: pairs of similar length share a bucket, to reduce padding and compiled shapes."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import numpy as np

MOST_LENGTHS = 512
"""maximum number of distinct lengths in the search for bucket widths; if there are more, lengths are rounded up"""


def bucket_bounds(lengths: np.ndarray, buckets: int) -> np.ndarray:
    """Return at most `buckets` increasing widths that minimize the padding of rows of these `lengths` (n,).

    The last width is the largest length. The widths are found by dynamic programming over the distinct lengths
    w_1 < w_2 < ... of the rows. If P_b(j) is the minimum number of tokens (with padding) of all rows of the j shortest
    lengths in b buckets, and n_j the number of these rows, then

        P_1(j) = w_j n_j,    P_b(0) = 0,    P_b(j) = min over i < j of P_{b-1}(i) + w_j (n_j - n_i).

    The number of tokens without padding is fixed, so this also minimizes the padding. The solution is exact up to the
    rounding of lengths when there are more than `MOST_LENGTHS` of them.
    """
    lengths = np.asarray(lengths, np.int64)
    # Round lengths up to multiples of `step` (-(-a // b) is the ceiling of a / b), but not above the largest length.
    step = -(-int(lengths.max()) // MOST_LENGTHS)
    widths, counts = np.unique(np.minimum(-(-lengths // step) * step, lengths.max()), return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])  # n_j: rows of the j shortest lengths
    # places[i, j]: w_{j+1} (n_{j+1} - n_i), the tokens of lengths i + 1 to j + 1 in one bucket; infinite if i > j.
    places = np.where(
        np.arange(len(widths) + 1)[:, None] < np.arange(1, len(widths) + 1)[None, :],
        widths[None, :] * (before[None, 1:] - before[:, None]),
        np.inf,
    )
    least, cuts = places[0], []  # least[j] is P_b(j + 1), here for b = 1
    for _ in range(min(buckets, len(widths)) - 1):
        # whole[i, j]: P_{b-1}(i) + the tokens of the last bucket, which has the lengths i + 1 to j + 1. P_b(0) is 0.
        whole = np.concatenate([[0.0], least])[:, None] + places
        cuts.append(whole.argmin(0))  # the best i for each j, to recover the buckets below
        least = whole.min(0)
    # Go back from the last bucket to the first: each one ends at `end` and starts after the best i.
    bounds, end = [], len(widths)
    for cut in reversed(cuts):
        bounds.append(widths[end - 1])
        end = cut[end - 1]
        if not end:  # fewer buckets than allowed reach the minimum
            break
    else:
        bounds.append(widths[end - 1])
    return np.array(bounds[::-1])


@dataclass(frozen=True)
class Bucket:
    """Pairs of similar length."""

    members: np.ndarray
    """(n,), indices of the pairs in the training split"""
    source_length: int
    """padded length of the sources, in tokens"""
    target_length: int
    """padded length of the targets, in tokens"""
    batches: int
    """batches in one pass over the members"""
    rows: int
    """rows per batch; rows that no member fills have weight 0"""


class TokenBatches:
    """An endless sequence of batches of similar token counts, with random access.

    Item i is (bucket, members, number of rows that are filled). Each pass contains every pair once, and its batches are
    in random order. The order depends only on the seed and the number of the pass, so that training can resume at any
    batch. Raises ValueError if a pair is too long for `batch_tokens`.
    """

    def __init__(
        self,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        *,
        batch_tokens: int,
        buckets: int,
        row_multiple: int,
    ):
        # A pair needs as many tokens per side as its longer side: batch_tokens limits both sides.
        longer = np.maximum(source_lengths, target_lengths)
        widest = int(longer.max())
        if widest * row_multiple > batch_tokens:
            raise ValueError(
                f"batch_tokens ({batch_tokens}) is too small for row_multiple ({row_multiple}) rows of the longest "
                f"pair ({widest} tokens). Use at least {widest * row_multiple}, or skip long pairs "
                f"(--data.max-source-length, --data.max-target-length)."
            )
        self.buckets: list[Bucket] = []
        bounds = bucket_bounds(longer, buckets)
        which = np.searchsorted(bounds, longer)
        for number, width in enumerate(bounds):
            members = np.flatnonzero(which == number)
            # The maximum number of rows that fit into batch_tokens, rounded down to a multiple of row_multiple.
            most = int(batch_tokens // width // row_multiple * row_multiple)
            batches = -(-len(members) // most)
            each = -(-len(members) // batches)  # spread the members evenly, so that few rows stay empty
            widths = int(source_lengths[members].max()), int(target_lengths[members].max())
            self.buckets.append(Bucket(members, *widths, batches, -(-each // row_multiple) * row_multiple))
        self.per_pass = sum(bucket.batches for bucket in self.buckets)
        self._tokens = int(source_lengths.sum() + target_lengths.sum())
        self._pass = functools.lru_cache(maxsize=2)(self._make_pass)
        self._seed = 0

    def seeded(self, seed: int) -> TokenBatches:
        """Return the same buckets, shuffled with a seed."""
        other = copy.copy(self)
        other._pass = functools.lru_cache(maxsize=2)(other._make_pass)
        other._seed = seed
        return other

    def describe(self) -> str:
        """Describe the shapes, the number of batches and the fraction of padding."""
        places = sum(b.batches * b.rows * (b.source_length + b.target_length) for b in self.buckets)
        shapes = ", ".join(f"{b.rows} x {b.source_length}+{b.target_length}" for b in self.buckets)
        padding = 100 * (1 - self._tokens / places)
        return f"{self.per_pass} batches per pass, rows x tokens {shapes}, {padding:.1f} % padding"

    def __len__(self) -> int:
        return 2**40  # Grain needs a length; no run reaches this many batches

    def __getitem__(self, item: int) -> tuple[Bucket, np.ndarray, int]:
        return self._pass(item // self.per_pass)[item % self.per_pass]

    def _make_pass(self, number: int) -> list[tuple[Bucket, np.ndarray, int]]:
        random = np.random.default_rng([self._seed, number])
        # Shuffle the members within their bucket, split them into batches of almost equal size, and fill up each batch
        # by repeating rows (np.resize), so that all batches of a bucket have one shape. Then shuffle the batches.
        made = [
            (bucket, np.resize(part, bucket.rows), len(part))
            for bucket in self.buckets
            for part in np.array_split(random.permutation(bucket.members), bucket.batches)
        ]
        return [made[place] for place in random.permutation(len(made))]
