"""Mixtures of sources: which source the next row comes from, with exact proportions and random access."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from transformer.config._checks import ConfigError

LONGEST_PERIOD = 100_000


class Mixture:
    """A periodic sequence of sources: of its first n rows, each source has its share, plus or minus less than 1.

    This is the algorithm of Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32(3): the deviation
    is at most 1 - 1 / (2K - 2) for K sources. The ratio of the weights is exact as written in decimals (0.7 and 0.3 are
    7 to 3). Raises ConfigError if they have too many digits, so that the period is too long.
    """

    def __init__(self, weights: Sequence[float]):
        ratios = [Fraction(str(weight)) for weight in weights]
        unit = math.lcm(*(ratio.denominator for ratio in ratios))
        counts = [int(ratio * unit) for ratio in ratios]
        divisor = math.gcd(*counts)
        self._counts = np.array([count // divisor for count in counts], np.int64)
        """rows of each source in a period"""
        self.period = sum(count // divisor for count in counts)
        """number of rows after which the sequence of sources repeats"""
        if self.period > LONGEST_PERIOD:
            raise ConfigError(
                f"weights must be in the ratio of integers whose sum is at most {LONGEST_PERIOD:,}, got a sum of "
                f"{self.period:,} for {', '.join(map(str, weights))}. Round the weights to fewer digits."
            )
        self._sources, self._before = _one_period(self._counts.tolist(), self.period)

    def __getitem__(self, number: int) -> tuple[int, int]:
        """Return the source of a row, and how many rows of this source precede it."""
        periods, place = divmod(number, self.period)
        source = int(self._sources[place])
        return source, periods * int(self._counts[source]) + int(self._before[place])


def _one_period(counts: Sequence[int], period: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each row of a period, and the number of rows of this source before it."""
    scale = max(2 * len(counts) - 2, 1)
    taken = [0] * len(counts)
    sources, before = np.empty(period, np.int32), np.empty(period, np.int32)
    for place in range(period):
        # Of the sources whose next row would not come too early, the one whose next row must come first.
        allowed = [i for i, count in enumerate(counts) if scale * (count * (place + 1) - period * taken[i]) >= period]
        chosen = min(allowed, key=lambda i: ((taken[i] * scale + scale - 1) / counts[i], i))
        sources[place], before[place] = chosen, taken[chosen]
        taken[chosen] += 1
    return sources, before
