"""Ours and a peer, each in a process of its own, taking turns: what every comparison here is measured by."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from transformer.cli._allocator import KEEP, VARIABLE

ROOT = Path(__file__).resolve().parents[1]
ANSWER = "worker: "
"""begins the lines that are meant for the other side"""
ENVIRONMENTS: dict[str, dict[str, str]] = {"untouched": {}, "allocator": {VARIABLE: KEEP}}
"""what both sides are started with, by name: as they are, ours setting by itself what its programs set; and both with
the allocator that ours would set"""


class Worker:
    """A process that does one piece of work whenever it is told to: `python -m MODULE ARGUMENTS`, whose main calls
    `serve`.

    Raises:
        RuntimeError: it ended before it was asked to.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None):
        self._command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=os.environ | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = self._read()
        """what it said of itself when it was ready"""

    def run(self, times: int) -> list[float]:
        """Seconds of each of so many pieces, one after the other."""
        self._process.stdin.write(f"{times}\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """Lets it end."""
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> Any:
        for line in self._process.stdout:
            if line.startswith(ANSWER):  # the rest is what libraries print
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.wait()}; it said why above.")


def serve(work: Callable[[], Any], warm_up: int = 3, **facts: Any) -> None:
    """What a worker does: the work a few times, then as often as it is told to on standard input, until that ends.
    `facts` are told first, with the seconds that the first time took. `work` returns when it is really done.
    """
    start = time.perf_counter()
    work()
    first = time.perf_counter() - start
    for _ in range(warm_up):
        work()
    print(f"\n{ANSWER}{json.dumps({'first': first, **facts})}", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        print(f"\n{ANSWER}{json.dumps(seconds)}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Seconds for one piece of work by ours and by a peer, medians; `ratio` above 1: ours is so much faster."""

    work: str
    peer: str
    environment: str
    ours_seconds: float
    peer_seconds: float
    ratio: float
    """median of the ratios of the turns, peer / ours: what slows the machine down for a while slows both"""
    ours_first: float
    """seconds of the first time, compilation included"""
    peer_first: float


def compare(
    work: str, peer: str, ours: Sequence[str], theirs: Sequence[str], *, environment: str, turns: int, times: int
) -> Comparison:
    """Two workers (module and arguments), `turns` turns each of `times` pieces of work, after one another."""
    started = {
        name: Worker(*command, environment=ENVIRONMENTS[environment])
        for name, command in {"ours": ours, "peer": theirs}.items()
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in started}
    for turn in range(turns):
        for name in sorted(started, reverse=bool(turn % 2)):
            seconds[name].append(started[name].run(times))
    for worker in started.values():
        worker.stop()
    medians = {name: [statistics.median(turn) for turn in found] for name, found in seconds.items()}
    return Comparison(
        work=work,
        peer=peer,
        environment=environment,
        ours_seconds=statistics.median(second for turn in seconds["ours"] for second in turn),
        peer_seconds=statistics.median(second for turn in seconds["peer"] for second in turn),
        ratio=statistics.median(p / o for p, o in zip(medians["peer"], medians["ours"], strict=True)),
        ours_first=started["ours"].facts["first"],
        peer_first=started["peer"].facts["first"],
    )


def take_turns(works: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Seconds of each work in each turn, all in this process; once before without a watch, for what is compiled.
    A work returns when it is really done.
    """
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(turns):
        for name in list(works)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            works[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def times_faster(peer: Sequence[float], ours: Sequence[float]) -> float:
    """Median of the ratios of the turns, peer / ours: what slows the machine down for a while slows both."""
    return statistics.median(p / o for p, o in zip(peer, ours, strict=True))


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def last_line(work: str, peer: float, ours: float, ratio: float, unit: str, machine: str, **more: Any) -> str:
    """The JSON object that ends what a benchmark prints."""
    numbers = {"peer": peer, "ours": ours, "ratio": ratio}
    rounded = {name: float(f"{value:.4g}") for name, value in numbers.items()}
    return json.dumps({"work": work, **rounded, "unit": unit, "machine": machine, **more})
