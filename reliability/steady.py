"""Whether a run that goes on for hours stays as it was: slopes and quarters of what was seen of it from outside."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import theilslopes

MB = 1e6
MOST_GROWTH = 1.0
"""MB of memory an hour, after the first quarter"""
MOST_CHANGE = 0.05
"""share by which the last quarter may be slower or faster, or hold more of the machine's memory, than the second"""
BLOCKS = 18
"""of the time after the first quarter, for a slope: 5 minutes each in 2 hours"""


@dataclass(frozen=True)
class Sample:
    """What is seen of a process at one moment."""

    seconds: float
    """since the process was started"""
    in_use: float
    """bytes that it holds, arrays and Python's objects: the least since the last look, NaN where none was counted"""
    resident: int
    """bytes of the process in memory: that, what the allocator keeps to give it out again, and files that are mapped"""
    files: int
    """that are open"""
    threads: int
    programs: int
    """compiled so far"""
    step: int
    """last one in metrics.jsonl"""
    speed: float
    """target tokens a second of the lines since the last sample; NaN where there was none"""


@dataclass(frozen=True)
class Measure:
    """A row of the table: what was in the second and in the last quarter of the time, and whether that is too much."""

    what: str
    before: str
    after: str
    told: str
    allowed: str
    failed: bool


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """The median of the slopes between the medians of blocks of time, and its 95 % bounds (Theil 1950; Sen 1968,
    Estimates of the regression coefficient based on Kendall's tau, section 5). One odd block moves it little.

    Raises:
        ValueError: fewer than three blocks have a value.
    """
    times, values = np.asarray(times, float), np.asarray(values, float)
    if len(times) < 3:
        raise ValueError(f"a slope needs 3 blocks of time with samples, got {len(times)} samples: run for longer.")
    block = np.minimum((times - times[0]) / (np.ptp(times) or 1.0) * BLOCKS, BLOCKS - 1).astype(int)
    points = [(np.median(times[block == i]), np.median(values[block == i])) for i in np.unique(block)]
    if len(points) < 3:
        raise ValueError(f"a slope needs 3 blocks of time with samples, got {len(points)}: run for longer.")
    times, values = zip(*points, strict=True)
    found = theilslopes(values, times)
    return float(found.slope), float(found.low_slope), float(found.high_slope)


def measures(samples: Sequence[Sample], late: Sequence[str] = ()) -> list[Measure]:
    """The rows of the table. The first quarter is the warm-up; `late` are the programs compiled after it.

    Raises:
        ValueError: too few samples.
    """
    end = samples[-1].seconds if samples else 0.0
    settled = [sample for sample in samples if sample.seconds >= end / 4]
    second = [sample for sample in settled if sample.seconds < end / 2]
    last = [sample for sample in settled if sample.seconds >= end * 3 / 4]
    if len(second) < 3 or len(last) < 3:
        raise ValueError(f"expected 3 samples in a quarter of the time, got {len(samples)} in all: run for longer.")
    rows = []
    counted = [sample for sample in settled if not math.isnan(sample.in_use)]
    grown, low, high = slope([s.seconds / 3600 for s in counted], [s.in_use / MB for s in counted])
    told = f"{grown:+.2f} MB an hour (95 %: {low:+.2f} to {high:+.2f})"
    before, after = (f"{np.nanmedian([s.in_use for s in part]) / MB:,.1f} MB" for part in (second, last))
    rows.append(
        Measure("memory in use", before, after, told, f"below {MOST_GROWTH:g} MB an hour", not grown < MOST_GROWTH)
    )
    before, after = (max(sample.resident for sample in part) for part in (second, last))
    told, most = f"{100 * (after / before - 1):+.1f} %", f"{100 * MOST_CHANGE:g} % more"
    words = f"{before / MB:,.1f} MB", f"{after / MB:,.1f} MB"
    rows.append(Measure("resident memory, most", *words, told, most, after > before * (1 + MOST_CHANGE)))
    for name, what in (("files", "open files, least"), ("threads", "threads, least")):  # a leak lifts the least
        before, after = (min(getattr(sample, name) for sample in part) for part in (second, last))
        rows.append(Measure(what, f"{before}", f"{after}", "", "no more", after > before))
    before = settled[0].programs
    rows.append(Measure("programs compiled", f"{before}", f"{last[-1].programs}", names(late), "no more", bool(late)))
    before, after = (float(np.nanmedian([sample.speed for sample in part])) for part in (second, last))
    rows.append(_speed("tokens/s while training, median", before, after, [sample.speed for sample in second]))
    before, after = ((part[-1].step - part[0].step) / (part[-1].seconds - part[0].seconds) for part in (second, last))
    rows.append(_speed("steps/s, evaluations and checkpoints included", before, after))
    return rows


def names(programs: Sequence[str]) -> str:
    """Each once, with how often."""
    return ", ".join(f"{name} x {count}" for name, count in Counter(programs).most_common())


def _speed(what: str, before: float, after: float, among: Sequence[float] = ()) -> Measure:
    change = after / before - 1.0
    told = f"{100 * change:+.1f} %"
    if among:
        low, high = np.nanpercentile(among, (25, 75))
        told += f" (half of all within {100 * (high - low) / before:.1f} %)"
    allowed = f"{100 * MOST_CHANGE:g} %"
    return Measure(what, f"{before:,.1f}", f"{after:,.1f}", told, allowed, not abs(change) <= MOST_CHANGE)
