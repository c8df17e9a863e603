"""Batches by token count: pairs of like length together, so that little is padding and few shapes are compiled."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import numpy as np

MOST_LENGTHS = 512
"""different lengths that the search for widths tells apart; more are rounded up to so many"""


def bucket_bounds(lengths: np.ndarray, buckets: int) -> np.ndarray:
    """The widths, rising and at most `buckets`, that pad rows of these `lengths` (n,) least; the last is the longest.

    Exact: the least padding of the j shortest lengths in b buckets follows from that of fewer in b - 1. Of more than
    `MOST_LENGTHS` different lengths, nearly exact.
    """
    lengths = np.asarray(lengths, np.int64)
    step = -(-int(lengths.max()) // MOST_LENGTHS)
    widths, counts = np.unique(np.minimum(-(-lengths // step) * step, lengths.max()), return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    # places[i, j]: what rows i to j - 1 take in one bucket
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
    """Pairs of like length."""

    members: np.ndarray
    """(n,), places of the pairs in their split"""
    source_length: int
    """width of the sources, in tokens"""
    target_length: int
    """width of the targets, in tokens"""
    batches: int
    """in one pass over the members"""
    rows: int
    """of each batch; those that members don't fill have weight 0"""


class TokenBatches:
    """An endless sequence of batches of like token counts: item i is (bucket, members, rows filled), random access.

    Each pass holds every pair once, its batches in random order; it depends on the seed and the number of the pass
    alone.

    Raises:
        ValueError: a pair too long for `batch_tokens`.
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
                f"batch_tokens ({batch_tokens}) has no room for row_multiple ({row_multiple}) rows of the longest pair "
                f"({widest} tokens): give at least {widest * row_multiple}, or leave long pairs out "
                f"(--data.max-source-length, --data.max-target-length)."
            )
        self.buckets: list[Bucket] = []
        bounds = bucket_bounds(longer, buckets)
        which = np.searchsorted(bounds, longer)
        for number, width in enumerate(bounds):
            members = np.flatnonzero(which == number)
            most = int(batch_tokens // width // row_multiple * row_multiple)
            batches = -(-len(members) // most)
            each = -(-len(members) // batches)  # as even as can be, so that hardly a row is left over
            widths = int(source_lengths[members].max()), int(target_lengths[members].max())
            self.buckets.append(Bucket(members, *widths, batches, -(-each // row_multiple) * row_multiple))
        self.per_pass = sum(bucket.batches for bucket in self.buckets)
        self._tokens = int(source_lengths.sum() + target_lengths.sum())
        self._pass = functools.lru_cache(maxsize=2)(self._make_pass)
        self._seed = 0

    def seeded(self, seed: int) -> TokenBatches:
        """The same buckets in the order of a seed."""
        other = copy.copy(self)
        other._pass = functools.lru_cache(maxsize=2)(other._make_pass)
        other._seed = seed
        return other

    def describe(self) -> str:
        """Shapes, number of batches and share of padding."""
        places = sum(b.batches * b.rows * (b.source_length + b.target_length) for b in self.buckets)
        shapes = ", ".join(f"{b.rows} x {b.source_length}+{b.target_length}" for b in self.buckets)
        padding = 100 * (1 - self._tokens / places)
        return f"{self.per_pass} batches a pass, rows x tokens {shapes}, {padding:.1f} % padding"

    def __len__(self) -> int:
        return 2**40  # endless, for all who count

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
