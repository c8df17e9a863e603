"""Fraction of the training time that is spent waiting for data, from the metrics of runs.

Usage: python -m benchmarks.pipeline [--steps 200] [--recipes number_words shakespeare multi30k] [--data.OPTION ...]

Trains the recipes for a few steps with `train.py`, and reads `perf/data_wait` from metrics.jsonl: the fraction of the
time between two lines in which a batch is prepared while the device is idle. The goal is less than 2 %. Options that
begin with --data. are passed to train.py. The last line is a JSON object.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.side_by_side import ROOT, last_line, versions
from transformer.viz import read_metrics

RECIPES = {"number_words": "number_words", "shakespeare": "shakespeare_cpu", "multi30k": "multi30k"}
GOAL = 0.02


def measure(recipe: str, steps: int, words: list[str]) -> tuple[float, float]:
    """Return (fraction of the time spent waiting, seconds per step), medians over all lines after the first."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"training.steps": steps, "logging.every": max(steps // 10, 1), "evaluation.every": "None"}
        options |= {"evaluation.exact-match-examples": 0} if recipe != "shakespeare_cpu" else {}
        command = [sys.executable, "train.py", f"configs/{recipe}.py", "--workdir", f"{folder}/run", *words]
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    timed = [line for line in lines if "perf/data_wait" in line][1:]
    return tuple(statistics.median(line[name] for line in timed) for name in ("perf/data_wait", "perf/step_time_s"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["number_words", "shakespeare"])
    options, words = parser.parse_known_args()
    where = machine()
    print(f"{where}\n{'recipe':>14} {'ms/step':>10} {'data wait':>15}")
    found = {}
    for name in options.recipes:
        found[name] = measure(RECIPES[name], options.steps, words if name != "number_words" else [])
        wait, seconds = found[name]
        verdict = "" if wait < GOAL else f", NOT below {100 * GOAL:.0f} %"
        print(f"{name:>14} {1e3 * seconds:10.1f} {100 * wait:13.2f} %{verdict}", flush=True)
    worst = max(found, key=lambda name: found[name][0])
    wait, seconds = found[worst]
    print(
        last_line(
            f"data of {worst}",
            seconds,
            seconds * wait,
            wait,
            "seconds per step, and of waiting in it",
            where,
            all=found,
            versions=versions("jax", "grain"),
        )
    )


if __name__ == "__main__":
    main()
