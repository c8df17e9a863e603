"""Train, evaluate and save for hours, and check that memory use does not grow and throughput does not fall.

Usage: python -m reliability.soak --hours 2
       python -m reliability.soak --hours 2 --output docs/soak.json    also write the results to this file, and table
                                                                       and plot to reliability.md in its directory

train.py runs in a separate process until it receives SIGTERM. Resident memory, open files and threads are read from
/proc (Linux), the throughput from metrics.jsonl. Allocated bytes and compiled programs are counted inside the process
(`reliability.monitored`). The first quarter of the time is the warm-up. The exit code is 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from reliability.invocations import Call, command, first_fault, newest, run_state
from reliability.monitored import Lines, bytes_in_use
from reliability.page import put, soak_table
from reliability.steady import MB, Measure, Sample, memory_measures, training_measures

OPTIONS = (
    *("--training.steps", "1000000000", "--optimizer.schedule", "constant", "--optimizer.learning-rate", "1e-3"),
    *("--training.ema-decay", "0.99", "--model.dropout-rate", "0.1"),
    *("--checkpoint.every", "3000", "--evaluation.every", "50", "--evaluation.exact-match-examples", "0"),
)
"""options of the run: the unmodified model of the recipe, an evaluation every few seconds, and a checkpoint about every
five minutes, not more often, because each checkpoint leaks tens of kilobytes (docs/reliability.md)"""
VARIABLES = {"PYTHONMALLOC": "malloc"}
"""environment variables of the run, with which the allocated bytes include Python objects"""
EVERY = 10.0
"""mean number of seconds between two samples"""
KEPT = 240
"""maximum number of samples in the results file"""
LEAST_HOURS = 0.1
"""minimum duration for a verdict; shorter runs mostly compile"""
PAGE = "reliability.md"


class Watch:
    """Sample a running process. `programs` contains the time (`time.monotonic`) and name of each compiled program."""

    def __init__(self, pid: int, start: float, workdir: Path, inside: Path):
        """Create a watch.

        Args:
            pid: process id.
            start: `time.monotonic()` at the start of the process.
            workdir: workdir of the run.
            inside: file written by `reliability.monitored`.
        """
        self._process, self._start = Path("/proc", str(pid)), start
        self.metrics = workdir / "metrics.jsonl"
        self._metrics, self._inside = Lines(self.metrics), Lines(inside)
        self._step = 0
        self.programs: list[tuple[float, str]] = []

    def look(self) -> Sample:
        """Return a sample; raise OSError if the process has ended."""
        now = time.monotonic()
        resident = dict(_fields(self._process / "smaps_rollup"))["Rss"] * 1024
        files, threads = len(os.listdir(self._process / "fd")), dict(_fields(self._process / "status"))["Threads"]
        records, lines = self._inside.new(), self._metrics.new()
        self.programs += [(line["at"], line["compiled"]) for line in records if "compiled" in line]
        self._step = max([self._step, *(line["step"] for line in lines)])
        return Sample(
            seconds=now - self._start,
            in_use=min((line["in_use"] for line in records if "in_use" in line), default=math.nan),
            resident=resident,
            files=files,
            threads=threads,
            programs=len(self.programs),
            step=self._step,
            speed=median([line["perf/tokens_per_s"] for line in lines if "perf/tokens_per_s" in line] or [math.nan]),
            cpu=_cpu_seconds(self._process),
        )


def _cpu_seconds(process: Path) -> float:
    """Return the processor time of a process, in user and in system mode (proc(5), /proc/PID/stat)."""
    words = (process / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _fields(path: Path) -> list[tuple[str, int]]:
    """Return names and numbers of a file in /proc with lines `Name:  12 kB` or `Name: 12`."""
    pairs = [line.partition(":")[::2] for line in path.read_text(encoding="ascii", errors="replace").splitlines()]
    return [(name, int(rest.split()[0])) for name, rest in pairs if rest.split() and rest.split()[0].isdecimal()]


@dataclass
class Soaked:
    """Observations of a run, and its results."""

    samples: list[Sample]
    late: list[str]
    """names of programs that were compiled after the first quarter"""
    faults: list[str]
    """faults of its exit code and output"""
    steps: int
    evaluations: int
    spikes: int
    """number of loss spikes, which are normal in hours at a constant learning rate and are not faults"""


def soak(
    folder: Path,
    hours: float,
    every: float = EVERY,
    options: Sequence[str] = OPTIONS,
    enough: Callable[[Sample], bool] = lambda sample: False,
) -> Soaked:
    """Train in `folder` and sample the process.

    Args:
        folder: working directory.
        hours: duration.
        every: mean number of seconds between samples. The intervals are random, so that they do not follow the period
            of evaluations and checkpoints.
        options: options of train.py.
        enough: condition on a sample that ends the run early.
    """
    workdir, inside, rng = folder / "run", folder / "inside.jsonl", random.Random(0)
    end, samples, printed_at = 3600 * hours, [], 0.0
    under = ("-m", "reliability.monitored", str(inside))
    with Call(workdir, folder / "data", folder, common=options, under=under, variables=VARIABLES) as call:
        watch = Watch(call.members[0].pid, call.start, workdir, inside)
        while call.seconds < end and call.running():
            time.sleep(min(every * rng.uniform(0.5, 1.5), max(end - call.seconds, 0.0)))
            try:
                samples.append(watch.look())
            except OSError:
                break  # the process has ended; its exit code is checked below
            if enough(samples[-1]):
                break
            if samples[-1].seconds - printed_at >= 300:
                printed_at, last = samples[-1].seconds, samples[-1]
                print(f"{printed_at / 60:.0f} min: step {last.step:,}, {last.in_use / MB:,.1f} MB in use", flush=True)
        call.signal(signal.SIGTERM)
        faults = first_fault(call.end(), [128 + signal.SIGTERM], call.output())
        output = call.output().splitlines()
    faults += [f"printed: {line}" for line in output if "Traceback" in line or "damaged" in line]
    if not faults and run_state(workdir).step != newest(workdir):
        faults.append(f"the newest checkpoint, of step {newest(workdir)}, is damaged")
    seconds = samples[-1].seconds if samples else 0.0
    late = [name for when, name in watch.programs if when - call.start > seconds / 4]
    evaluations, spikes = (sum(words in line for line in output) for words in (": eval loss", "loss spike"))
    return Soaked(samples, late, faults, newest(workdir), evaluations, spikes)


def record(soaked: Soaked, found: list[Measure], hours: float, where: str) -> dict[str, Any]:
    """Return the results as JSON values; `where` describes the machine."""
    kept = soaked.samples[:: math.ceil(len(soaked.samples) / KEPT)]
    return {
        "date": date.today().isoformat(),
        "machine": where,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "orbax-checkpoint", "grain")},
        "hours": hours,
        "command": command(OPTIONS),
        "steps": soaked.steps,
        "evaluations": soaked.evaluations,
        "spikes": soaked.spikes,
        "faults": soaked.faults,
        "measures": [asdict(measure) for measure in found],
        "series": {
            "seconds": [round(sample.seconds) for sample in kept],
            "in_use": [_whole(sample.in_use) for sample in kept],
            "resident": [sample.resident for sample in kept],
            "tokens_per_s": [_whole(sample.speed) for sample in kept],
        },
    }


def _whole(number: float) -> int | None:
    return None if math.isnan(number) else round(number)


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot memory and throughput by time into a PNG file."""
    from transformer.viz._style import BLUE, GREEN, dress, new_figure, save

    series = result["series"]
    minutes = np.asarray(series["seconds"]) / 60
    figure = new_figure(8, 4.4, dpi=110)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, label, style in (("resident", "resident", ":"), ("in_use", "in use", "-")):
        sizes = np.asarray(series[name], float) / MB
        above.plot(minutes, sizes, color=BLUE, linestyle=style, linewidth=1.4, label=label)
    above.legend(frameon=False)
    above.set_ylim(bottom=0)
    dress(above, f"{result['hours']:g} h of training, with checkpoints and evaluations", "", "memory, MB")
    speeds = np.asarray(series["tokens_per_s"], float)
    below.plot(minutes, speeds, color=GREEN, linewidth=1.0)
    below.set_ylim(bottom=0)
    dress(below, "", "minutes", "tokens/s")
    save(figure, path)


def checked_page(parser: argparse.ArgumentParser, output: Path | None, name: str) -> Path | None:
    """Return the page that gets the table of a name; end the program if this system or the output can't be used.

    It is called before a run, so that a run of hours does not fail at its end.

    Args:
        parser: ends the program.
        output: .json file for the results, in the directory of the page; None: there is no page.
        name: name of the marks in the page.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        parser.error("memory is read from /proc/PID/smaps_rollup, which this system lacks: run this command on Linux")
    try:
        bytes_in_use()
    except OSError as error:
        parser.error(str(error))
    if output is None:
        return None
    page = output.with_name(PAGE)
    if output.suffix != ".json" or not page.exists():
        parser.error(f"--output must be a .json file in the directory of {PAGE}, got {output}")
    try:
        put(page.read_text(encoding="utf-8"), name, "")
    except ValueError as error:
        parser.error(f"{page}: {error}")
    return page


def main(arguments: list[str]) -> int:
    """Train, sample and check the limits; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0, help="duration in hours (default: 2)")
    parser.add_argument("--output", type=Path, help=f".json file for the results, in the directory of {PAGE}")
    parser.add_argument(
        "--folder", type=Path, help="working directory, which is not deleted (default: a temporary directory)"
    )
    options = parser.parse_args(arguments)
    if not options.hours >= LEAST_HOURS:
        parser.error(
            f"--hours must be at least {LEAST_HOURS:g} (a quarter of it is the warm-up), got {options.hours:g}"
        )
    page = checked_page(parser, options.output, "soak")
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that the run does not outlive this process
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.folder))
    print(f"working in {folder}", flush=True)
    soaked = soak(folder, options.hours)
    for fault in soaked.faults:
        print(f"    {fault}", flush=True)

    from benchmarks.machine import machine

    try:
        found = [*memory_measures(soaked.samples, soaked.late), *training_measures(soaked.samples)]
    except ValueError as error:
        print(f"failed: {error} The output of the run is in {folder}.", file=sys.stderr)
        return 1
    result = record(soaked, found, options.hours, machine())
    table = soak_table(result)
    print(f"\n{table}")
    if page:
        options.output.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
        draw(result, page.parent / "images" / "soak.png")
        page.write_text(put(page.read_text(encoding="utf-8"), "soak", table), encoding="utf-8")
    failed = [*soaked.faults, *(measure["what"] for measure in result["measures"] if measure["failed"])]
    if failed:
        print(f"failed: {'; '.join(failed)}. The run is in {folder}.", file=sys.stderr)
    elif not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
