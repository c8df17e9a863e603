"""Compare the speed of this checkout with that of another one, such as the commit before a refactoring.

Usage: python -m benchmarks.checkouts OTHER [--works small large] [--turns 4]

OTHER is the root of the other checkout. The same Python environment runs both. Each work runs in one process per
checkout. The two take turns, so that a temporary slowdown of the machine affects both. A ratio is the median over the
turns of (time of this checkout) / (time of the other): below 1, this checkout is faster. Works: a training step of each
model of `benchmarks.train_step`, greedy decoding of GPT-2 124M (`benchmarks.decode`), compilation of a training step
(`benchmarks.compile`), and the import of the package in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.side_by_side import ROOT, Worker

WORKERS: dict[str, tuple[str, ...]] = {
    "small": ("benchmarks.train_step", "--worker", "ours", "small"),
    "large": ("benchmarks.train_step", "--worker", "ours", "large"),
    "translator": ("benchmarks.train_step", "--worker", "ours", "translator"),
    "decode": ("benchmarks.decode", "--worker", "ours", "1"),
}
"""works in persistent processes: name -> module and arguments of a worker, the same in both checkouts"""
TIMES = {"small": 20, "large": 4, "translator": 3, "decode": 1}
"""repetitions of a work in one turn"""

COMPILE = """
import time, jax
from benchmarks.compile import compile_step
jax.config.update("jax_enable_compilation_cache", False)
compile_step(2, True)
start = time.perf_counter()
compile_step(12, True)
compile_step(2, False)
print(time.perf_counter() - start)
"""
IMPORT = """
import time
start = time.perf_counter()
import transformer
transformer.CausalLM, transformer.MultiHeadAttention
print(time.perf_counter() - start)
"""
PROGRAMS = {"compile": COMPILE, "import": IMPORT}
"""works that start a new process for each run: name -> program that prints its seconds"""

WORKS = (*WORKERS, *PROGRAMS)


def stays(work: str, checkout: Path) -> tuple[Callable[[], float], Callable[[], None]]:
    """Start a worker in a checkout. Return a function that gives the median seconds of a turn, and one to stop it."""
    worker = Worker(*WORKERS[work], checkout=checkout)
    return lambda: statistics.median(worker.run(TIMES[work])), worker.stop


def new_process(work: str, checkout: Path) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return a function that runs the program in a new process and gives its seconds, and one that does nothing."""

    def run() -> float:
        command = [sys.executable, "-c", PROGRAMS[work]]
        done = subprocess.run(command, cwd=checkout, env=os.environ, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1])

    return run, lambda: None


def compare_checkouts(work: str, other: Path, turns: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each turn: of this checkout, and of the other."""
    start = stays if work in WORKERS else new_process
    sides = [start(work, checkout) for checkout in (ROOT, other)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for side in (0, 1) if turn % 2 else (1, 0):
            seconds[side].append(sides[side][0]())
    for _, stop in sides:
        stop()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="root of the other checkout")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--turns", type=int, default=8, help="turns of each checkout")
    options = parser.parse_args()
    if not (options.other / "transformer").is_dir():
        parser.error(f"{options.other} is not a checkout of this repository: it has no folder transformer/.")

    from benchmarks.machine import machine

    start = time.perf_counter()
    print(f"{machine()}\n\n| work | this checkout, s | other, s | ratio | smallest and largest |")
    print("| --- | ---: | ---: | ---: | --- |")
    ratios = {}
    for work in options.works:
        ours, others = compare_checkouts(work, options.other.resolve(), options.turns)
        turns = sorted(a / b for a, b in zip(ours, others, strict=True))
        ratios[work] = round(statistics.median(turns), 3)
        medians = f"{statistics.median(ours):.4f} | {statistics.median(others):.4f}"
        print(f"| {work} | {medians} | {ratios[work]:.3f} | {turns[0]:.3f} to {turns[-1]:.3f} |", flush=True)
    print(json.dumps({"ratios": ratios, "turns": options.turns, "seconds": round(time.perf_counter() - start)}))


if __name__ == "__main__":
    main()
