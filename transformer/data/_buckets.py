"""Batches by token count: pairs of similar length share a batch, for little padding and few compiled shapes."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import numpy as np

MOST_LENGTHS = 512
"""largest number of distinct lengths in the search for bucket widths; more lengths are rounded up to this many"""


def bucket_bounds(lengths: np.ndarray, buckets: int) -> np.ndarray:
    """Return at most `buckets` increasing widths that minimize the padding of rows of these `lengths` (n,).

    The last width is the largest length. The solution is exact: the least padding of the j shortest lengths in b
    buckets follows from the solutions for fewer lengths in b - 1 buckets. With more than `MOST_LENGTHS` distinct
    lengths it is nearly exact.
    """
    lengths = np.asarray(lengths, np.int64)
    step = -(-int(lengths.max()) // MOST_LENGTHS)
    widths, counts = np.unique(np.minimum(-(-lengths // step) * step, lengths.max()), return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    # places[i, j]: padded tokens of rows i to j - 1 in one bucket
    places = np.where(
        np.arange(len(widths) + 1)[:, None] < np.arange(1, len(widths) + 1)[None, :],
        widths[None, :] * (before[None, 1:] - before[:, None]),
        np.inf,
    )
    least, cuts = places[0], []
    for _ in range(min(buckets, len(widths)) - 1):
        whole = np.concatenate([[0.0], least])[:, None] + places
        cuts.append(whole.argmin(0))
        least = whole.min(0)
    bounds, end = [], len(widths)
    for cut in reversed(cuts):
        bounds.append(widths[end - 1])
        end = cut[end - 1]
        if not end:
            break
    else:
        bounds.append(widths[end - 1])
    return np.array(bounds[::-1])


@dataclass(frozen=True)
class Bucket:
    """Pairs of similar length."""

    members: np.ndarray
    """(n,), indices of the pairs in their split"""
    source_length: int
    """padded length of the sources, in tokens"""
    target_length: int
    """padded length of the targets, in tokens"""
    batches: int
    """batches in one pass over the members"""
    rows: int
    """rows per batch; rows that no member fills have weight 0"""


class TokenBatches:
    """An endless sequence of batches of similar token counts, with random access: item i is (bucket, members, rows
    filled).

    Each pass contains every pair once, with its batches in random order. The order depends only on the seed and the
    number of the pass.

    Raises:
        ValueError: a pair is too long for `batch_tokens`.
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
        longer = np.maximum(source_lengths, target_lengths)
        widest = int(longer.max())
        if widest * row_multiple > batch_tokens:
            raise ValueError(
                f"batch_tokens ({batch_tokens}) is too small for row_multiple ({row_multiple}) rows of the longest "
                f"pair ({widest} tokens). Use at least {widest * row_multiple}, or leave long pairs out "
                f"(--data.max-source-length, --data.max-target-length)."
            )
        self.buckets: list[Bucket] = []
        bounds = bucket_bounds(longer, buckets)
        which = np.searchsorted(bounds, longer)
        for number, width in enumerate(bounds):
            members = np.flatnonzero(which == number)
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
        return 2**40  # practically endless

    def __getitem__(self, item: int) -> tuple[Bucket, np.ndarray, int]:
        return self._pass(item // self.per_pass)[item % self.per_pass]

    def _make_pass(self, number: int) -> list[tuple[Bucket, np.ndarray, int]]:
        random = np.random.default_rng([self._seed, number])
        made = [
            (bucket, np.resize(part, bucket.rows), len(part))
            for bucket in self.buckets
            for part in np.array_split(random.permutation(bucket.members), bucket.batches)
        ]
        return [made[place] for place in random.permutation(len(made))]
