"""Counters of a server in the text format of Prometheus."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterator

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""upper bounds of the buckets of a histogram"""


class Histogram:
    """Counts durations in buckets."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of this histogram: cumulative counts, sum and count."""
        so_far = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            so_far += count
            yield f'{name}_bucket{{le="{bound}"}} {so_far}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {so_far}"


class Metrics:
    """Counters since the start. Each is changed by one thread only, and read by others without a lock."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.shared_tokens = 0
        self.generated_tokens = 0
        self.steps = 0
        self.proposed_tokens = 0
        self.accepted_tokens = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.pages_used = 0
        self.finished: collections.Counter[str] = collections.Counter()
        self.answers: collections.Counter[tuple[str, int]] = collections.Counter()
        """answers by (path, status)"""
        self.first_token, self.duration = Histogram(), Histogram()

    @property
    def tokens(self) -> int:
        """Number of tokens that were read or generated."""
        return self.prompt_tokens + self.generated_tokens

    def text(self, *, running: int, waiting: int, slots: int, pages: int | None = None) -> str:
        """Return all values in the text format of Prometheus."""
        lines: list[str] = []

        def head(name: str, kind: str, what: str) -> str:
            lines.extend((f"# HELP transformer_{name} {what}", f"# TYPE transformer_{name} {kind}"))
            return f"transformer_{name}"

        gauges = {
            "requests_running": (running, "requests that are read or generated"),
            "requests_waiting": (waiting, "requests in the queue"),
            "slots": (slots, "maximum number of running requests"),
        }
        if pages is not None:
            gauges["pages"] = (pages, "pages of keys and values")
            gauges["pages_used"] = (self.pages_used, "pages of running requests at the last decoding step")
        for name, (value, what) in gauges.items():
            lines.append(f"{head(name, 'gauge', what)} {value}")
        counters = {
            "prompt_tokens": (self.prompt_tokens, "prompt tokens that were read"),
            "shared_prompt_tokens": (self.shared_tokens, "prompt tokens whose keys and values were reused"),
            "generated_tokens": (self.generated_tokens, "tokens that were generated"),
            "preemptions": (self.preemptions, "requests that returned their pages, to be computed again"),
            "recomputed_tokens": (self.recomputed_tokens, "generated tokens that were computed again"),
            "decoding_steps": (self.steps, "decoding steps of all slots together"),
            "proposed_tokens": (self.proposed_tokens, "tokens that a draft model or a lookup proposed"),
            "accepted_tokens": (self.accepted_tokens, "proposed tokens that the model accepted"),
        }
        for name, (value, what) in counters.items():
            lines.append(f"{head(f'{name}_total', 'counter', what)} {value}")
        name = head("finished_total", "counter", "texts by the reason of their end")
        lines += [f'{name}{{reason="{reason}"}} {count}' for reason, count in sorted(self.finished.items())]
        name = head("http_answers_total", "counter", "HTTP answers by path and status")
        answers = sorted(self.answers.items())
        lines += [f'{name}{{path="{path}",status="{status}"}} {count}' for (path, status), count in answers]
        times = {
            "first_token": (self.first_token, "time from the arrival of a request to its first token"),
            "request": (self.duration, "time from the arrival of a request to the end of its text"),
        }
        for name, (histogram, what) in times.items():
            lines += histogram.lines(head(f"{name}_seconds", "histogram", what))
        return "\n".join([*lines, ""])
