"""Check that a run of hours is steady: slope of memory use, and comparison of the second and the last quarter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import theilslopes

MB = 1e6
MOST_GROWTH = 1.0
"""maximum growth of the allocated memory after the first quarter, in MB per hour"""
MOST_CHANGE = 0.05
"""maximum relative change of the steps per processor second, and maximum increase of resident memory, from the second
to the last quarter"""
BLOCKS = 18
"""number of time blocks after the first quarter, for a slope; in 2 hours, 5 minutes each"""


@dataclass(frozen=True)
class Sample:
    """Measurements of a process at one time."""

    seconds: float
    """seconds since the start of the process"""
    in_use: float
    """allocated bytes, arrays and Python objects: minimum since the last sample, NaN if nothing was counted"""
    resident: int
    """resident bytes: allocated memory, freed memory that the allocator keeps, and mapped files"""
    files: int
    """number of open files"""
    threads: int
    programs: int
    """number of programs compiled so far"""
    step: int
    """last step in metrics.jsonl"""
    speed: float
    """target tokens per second, median of the records since the last sample; NaN if there is none"""
    cpu: float
    """processor time of all threads since the start of the process, in seconds"""


@dataclass(frozen=True)
class Measure:
    """A row of the table: values in the second and in the last quarter of the time, and whether the change is too
    large.
    """

    what: str
    before: str
    after: str
    told: str
    allowed: str
    failed: bool


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the Theil-Sen slope of the medians of time blocks, and its 95 % confidence bounds.

    The slope is the median of the slopes between all pairs of blocks (Theil 1950; Sen 1968, Estimates of the regression
    coefficient based on Kendall's tau, section 5). A single outlier changes it only slightly.

    Raises:
        ValueError: fewer than three blocks have a value.
    """
    times, values = np.asarray(times, float), np.asarray(values, float)
    if len(times) < 3:
        raise ValueError(f"a slope needs 3 blocks of time with samples, got {len(times)} samples. Run it for longer.")
    block = np.minimum((times - times[0]) / (np.ptp(times) or 1.0) * BLOCKS, BLOCKS - 1).astype(int)
    points = [(np.median(times[block == i]), np.median(values[block == i])) for i in np.unique(block)]
    if len(points) < 3:
        raise ValueError(f"a slope needs 3 blocks of time with samples, got {len(points)}. Run it for longer.")
    times, values = zip(*points, strict=True)
    found = theilslopes(values, times)
    return float(found.slope), float(found.low_slope), float(found.high_slope)


def _quarters(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Return the samples after the first quarter of the time, those of the second quarter, and of the last one.

    Raises:
        ValueError: there are too few samples.
    """
    end = samples[-1].seconds if samples else 0.0
    settled = [sample for sample in samples if sample.seconds >= end / 4]
    second = [sample for sample in settled if sample.seconds < end / 2]
    last = [sample for sample in settled if sample.seconds >= end * 3 / 4]
    if len(second) < 3 or len(last) < 3:
        raise ValueError(
            f"expected 3 samples in a quarter of the time, got {len(samples)} in total. Run it for longer."
        )
    return settled, second, last


def memory_measures(samples: Sequence[Sample], late: Sequence[str] = ()) -> list[Measure]:
    """Return the rows of what a process holds: memory, open files, threads and compiled programs.

    Args:
        samples: all samples. The first quarter of the time is the warm-up.
        late: names of the programs that were compiled after the warm-up.

    Raises:
        ValueError: there are too few samples.
    """
    settled, second, last = _quarters(samples)
    rows = []
    counted = [sample for sample in settled if not math.isnan(sample.in_use)]
    grown, low, high = slope([s.seconds / 3600 for s in counted], [s.in_use / MB for s in counted])
    remark = f"{grown:+.2f} MB per hour (95 %: {low:+.2f} to {high:+.2f})"
    before, after = (f"{np.nanmedian([s.in_use for s in part]) / MB:,.1f} MB" for part in (second, last))
    rows.append(
        Measure("memory in use", before, after, remark, f"below {MOST_GROWTH:g} MB per hour", not grown < MOST_GROWTH)
    )
    before, after = (max(sample.resident for sample in part) for part in (second, last))
    remark, most = f"{100 * (after / before - 1):+.1f} %", f"{100 * MOST_CHANGE:g} % increase"
    words = f"{before / MB:,.1f} MB", f"{after / MB:,.1f} MB"
    rows.append(Measure("resident memory, maximum", *words, remark, most, after > before * (1 + MOST_CHANGE)))
    for name, what in (("files", "open files, minimum"), ("threads", "threads, minimum")):  # a leak raises the minimum
        before, after = (min(getattr(sample, name) for sample in part) for part in (second, last))
        rows.append(Measure(what, f"{before}", f"{after}", "", "no increase", after > before))
    before = settled[0].programs
    rows.append(
        Measure("programs compiled", f"{before}", f"{last[-1].programs}", names(late), "no increase", bool(late))
    )
    return rows


def training_measures(samples: Sequence[Sample]) -> list[Measure]:
    """Return the rows of the speed of training: tokens per second, and steps per second of each clock.

    Raises:
        ValueError: there are too few samples.
    """
    _, second, last = _quarters(samples)
    before, after = (float(np.nanmedian([sample.speed for sample in part])) for part in (second, last))
    return [
        _speed("tokens/s while training, median", before, after, [sample.speed for sample in second]),
        _per("seconds", "steps/s, evaluations and checkpoints included", second, last),
        _per("cpu", "steps per processor second, evaluations and checkpoints included", second, last),
    ]


def requests_measures(samples: Sequence[Sample], answered: Sequence[tuple[float, float]]) -> list[Measure]:
    """Return the rows of a server: time to the first token, and answers per second of each clock.

    Args:
        samples: all samples, whose `step` counts answers.
        answered: of each answer: when it ended, in seconds since the first sample's start, and the seconds to its first
            token.

    Raises:
        ValueError: there are too few samples, or no answers in the second or in the last quarter of the time.
    """
    _, second, last = _quarters(samples)
    end, spans = samples[-1].seconds, ((0.25, 0.5), (0.75, 2.0))  # the last answers end after the last sample
    times = [[first for when, first in answered if low <= when / end < high] for low, high in spans]
    if not all(times):
        counts = " and ".join(str(len(part)) for part in times)
        raise ValueError(
            f"expected answers in the second and in the last quarter of the time, got {counts}. Run it for longer."
        )
    rows = []
    for share in (50, 99):
        before, after = (float(np.percentile(part, share)) for part in times)
        told = f"{100 * (after / before - 1):+.1f} %"
        what = f"time to the first token, {share}th percentile"
        rows.append(Measure(what, f"{before:.2f} s", f"{after:.2f} s", told, "depends on other programs", False))
    rows.append(_per("seconds", "answers/s", second, last))
    rows.append(_per("cpu", "answers per processor second", second, last))
    return rows


def names(programs: Sequence[str]) -> str:
    """Return the distinct names with their counts."""
    return ", ".join(f"{name} x {count}" for name, count in Counter(programs).most_common())


def _per(clock: str, what: str, second: Sequence[Sample], last: Sequence[Sample]) -> Measure:
    """Return the row of steps per second of a clock. Only processor time gives a verdict: see `_speed`."""
    before, after = (
        (part[-1].step - part[0].step) / max(getattr(part[-1], clock) - getattr(part[0], clock), 1e-9)
        for part in (second, last)
    )
    return _speed(what, before, after, verdict=clock == "cpu")


def _speed(what: str, before: float, after: float, among: Sequence[float] = (), verdict: bool = False) -> Measure:
    """Return the row of a speed. Without `verdict` it is only shown, because other programs change speeds by time."""
    change = after / before - 1.0
    remark = f"{100 * change:+.1f} %"
    if among:
        low, high = np.nanpercentile(among, (25, 75))
        remark += f" (interquartile range {100 * (high - low) / before:.1f} %)"
    allowed = f"{100 * MOST_CHANGE:g} %" if verdict else "depends on other programs"
    return Measure(what, f"{before:,.1f}", f"{after:,.1f}", remark, allowed, verdict and not abs(change) <= MOST_CHANGE)
