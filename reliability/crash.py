"""Kill, stop and damage training runs, fill their disk, and check that nothing is lost.

Usage: python -m reliability.crash --kills 50 --seed 0             run all scenarios
       python -m reliability.crash --only one_process --kills 5    run one scenario, or several: --only a --only b
       python -m reliability.crash --output docs/reliability.json  also write the results to this file, and the table
                                                                   to docs/reliability.md

Each scenario runs train.py in separate processes on CPU. It checks the exit codes, the printed lines, and the workdir
at the end: the newest checkpoint, the metrics (except times) and the generated texts must be bit-identical to those of
an uninterrupted run. The exit code is 1 if anything is lost.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import signal
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reliability import harming, killing
from reliability.invocations import command
from reliability.page import crash_table, put
from reliability.world import Tally, World, timed

SCENARIOS = {
    "one_process": killing.one_process,
    "two_processes": killing.two_processes,
    "preparing": killing.preparing,
    "terminated": killing.terminated,
    "full_disk": harming.full_disk,
    "damaged": harming.damaged,
    "strays": harming.strays,
    "two_runs": harming.two_runs,
    "clock_moved": harming.clock_moved,
}
"""scenarios by name, as for --only"""


def line(tally: Tally) -> str:
    """Return the result of a scenario in one line."""
    if tally.not_run:
        return f"{tally.name:14} not run: {tally.not_run}"
    verdict = "FAILED" if tally.failed else "ok"
    remarks = f" ({tally.summary})" if tally.summary else ""
    return f"{tally.name:14} {verdict:6} {tally.good} of {tally.times} as expected, {tally.seconds:.0f} s{remarks}"


def record(tallies: list[Tally], kills: int, seed: int, where: str) -> dict[str, Any]:
    """Return the results as JSON values; `where` describes the machine."""
    return {
        "date": date.today().isoformat(),
        "machine": where,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "orbax-checkpoint")},
        "kills": kills,
        "seed": seed,
        "command": command(),
        "seconds": round(sum(tally.seconds for tally in tallies)),
        "scenarios": [
            {
                "name": tally.name,
                "what": tally.what,
                "times": tally.times,
                "good": tally.good,
                "failed": tally.failed,
                "not_run": tally.not_run,
                "told": tally.summary,
                "faults": tally.faults,
                "seconds": round(tally.seconds),
            }
            for tally in tallies
        ],
    }


def main(arguments: list[str]) -> int:
    """Run the scenarios; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=int, default=50, help="number of SIGKILLs, for one process and again for two (default: 50)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of times, processes and file positions (default: 0)"
    )
    parser.add_argument("--only", action="append", choices=SCENARIOS, metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument(
        "--output",
        type=Path,
        help=".json file for the results; the table is written into the .md file of the same name",
    )
    parser.add_argument(
        "--folder", type=Path, help="working directory, which is not deleted (default: a temporary directory)"
    )
    options = parser.parse_args(arguments)
    if options.kills < 1:
        parser.error(f"--kills must be at least 1, got {options.kills}")
    if options.output and options.only:
        parser.error("--output needs all scenarios: remove --only")
    if options.output and (options.output.suffix != ".json" or not options.output.with_suffix(".md").exists()):
        parser.error(f"--output must be a .json file with an existing .md file of the same name, got {options.output}")

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no run outlives this process
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=options.folder))
    print(f"working in {folder}", flush=True)
    start, tallies = time.monotonic(), []
    world = World(folder, options.kills, options.seed, say=lambda text: print(text, flush=True))
    for name in options.only or SCENARIOS:
        tallies.append(timed(SCENARIOS[name], world, name))
        print(line(tallies[-1]), flush=True)
        for fault in tallies[-1].faults:
            print(f"    {fault}", flush=True)

    from benchmarks.machine import machine

    result = record(tallies, options.kills, options.seed, machine())
    table = crash_table(result)
    print(f"\n{table}")
    if options.output:
        options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        beside = options.output.with_suffix(".md")
        beside.write_text(put(beside.read_text(encoding="utf-8"), "crash", table), encoding="utf-8")
    failed = [tally.name for tally in tallies if tally.failed]
    if failed:
        print(f"failed: {', '.join(failed)}. The output of the runs is in {folder / 'log'}.", file=sys.stderr)
    elif not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result | {"seconds": round(time.monotonic() - start)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
