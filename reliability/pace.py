"""Measure how slow this machine is now, to scale limits of time: no verdict depends on a fixed number of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

QUICK = 0.08
"""seconds that the computation of `pace` takes on an idle core of the machine of docs/reliability.md"""
ROUNDS = 2_500_000
MOST = 100.0


def pace(clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how many times longer a fixed computation takes now than on an idle core, from 1 to `MOST`.

    Args:
        clock: `time.perf_counter` includes the load by other programs; `time.process_time` does not.
    """
    start, sum_ = clock(), 0
    for number in range(ROUNDS):
        sum_ += number & 7
    return min(max((clock() - start) / QUICK, 1.0), MOST)


class Limit:
    """A limit of seconds that grows with the time that the machine takes for a fixed computation.

    Args:
        seconds: the limit on an idle machine.
        clock: measures the elapsed time and the computation.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter):
        self.seconds, self._idle, self._clock, self._start = seconds, seconds, clock, clock()

    def passed(self) -> bool:
        """Return whether the limit has passed. The machine is measured only after `seconds`; the limit never falls."""
        elapsed = self._clock() - self._start
        if elapsed > self.seconds:
            self.seconds = max(self.seconds, self._idle * pace(self._clock))
        return elapsed > self.seconds

    def wait(self, condition: Callable[[], object], every: float = 0.05) -> bool:
        """Wait until the condition is true (return True) or the limit has passed (return False)."""
        while not condition():
            if self.passed():
                return False
            time.sleep(every)
        return True
