"""Measurement of our code and a peer in separate processes that take turns, shared by the benchmarks."""

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
"""prefix of the lines that a worker sends to the parent process"""
ENVIRONMENTS: dict[str, dict[str, str]] = {"untouched": {}, "allocator": {VARIABLE: KEEP}}
"""environment variables of both sides by setting. `untouched`: no changes; our side applies the allocator settings of
its programs itself. `allocator`: both sides start with these allocator settings"""


class Worker:
    """A process that runs a piece of work on request: `python -m MODULE ARGUMENTS`, whose main calls `serve`.

    Raises:
        RuntimeError: the process ended before `stop` was called.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, checkout: Path = ROOT
    ):
        self._command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(
            self._command,
            cwd=checkout,
            env=os.environ | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = self._read()
        """values that the process reported when it was ready"""

    def run(self, times: int) -> list[float]:
        """Run the work `times` times in sequence, and return the seconds of each run."""
        self._process.stdin.write(f"{times}\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> Any:
        for line in self._process.stdout:
            if line.startswith(ANSWER):  # other lines are output of libraries
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"{' '.join(self._command)} ended with status {self._process.wait()}; see its output above.")


def serve(work: Callable[[], Any], warm_up: int = 3, **facts: Any) -> None:
    """Run the loop of a worker: warm up, then read numbers of runs from standard input until it is closed.

    Args:
        work: the piece of work. It must wait for its results (`jax.block_until_ready`) before it returns.
        warm_up: runs before the first measurement, after the first run, which compiles.
        facts: values to report when the worker is ready, together with the seconds of the first run.
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
    """Median seconds of one piece of work on both sides. A `ratio` above 1 means that ours is faster."""

    work: str
    peer: str
    environment: str
    ours_seconds: float
    peer_seconds: float
    ratio: float
    """median over the turns of peer / ours; a temporary slowdown of the machine affects both sides of a turn"""
    ours_first: float
    """seconds of the first run, including compilation"""
    peer_first: float


def compare(
    work: str, peer: str, ours: Sequence[str], theirs: Sequence[str], *, environment: str, turns: int, times: int
) -> Comparison:
    """Measure two workers that take turns.

    Args:
        work: name of the work.
        peer: name of the peer.
        ours: module and arguments of our worker.
        theirs: module and arguments of the peer's worker.
        environment: name of a setting in `ENVIRONMENTS`.
        turns: turns of each worker. The order of the two alternates.
        times: runs per turn.
    """
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
    """Return the seconds of each work in each turn, all in this process, after one untimed run that compiles.

    Each work must wait for its results before it returns. The order alternates with each turn.
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
    """Return the median over the turns of peer / ours. A temporary slowdown of the machine affects both sides."""
    return statistics.median(p / o for p, o in zip(peer, ours, strict=True))


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of these packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def last_line(work: str, peer: float, ours: float, ratio: float, unit: str, machine: str, **more: Any) -> str:
    """Return the JSON object that a benchmark prints as its last line."""
    numbers = {"peer": peer, "ours": ours, "ratio": ratio}
    rounded = {name: float(f"{value:.4g}") for name, value in numbers.items()}
    return json.dumps({"work": work, **rounded, "unit": unit, "machine": machine, **more})
