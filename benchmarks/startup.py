"""Time that `from transformer import CausalLM` takes, beside `import jax` and `import jax, flax.linen`, each in fresh
processes; and time from the start of `train.py` with the default recipe to its first step.

Usage: python -m benchmarks.startup [--rounds 11] [--steps-only]

Prints medians in seconds, wall time and CPU time (user + system) of the process; on a busy machine the second is the
steadier one. Beside them what comes on top of jax (the goal is less than 0.5 s), as the median of the differences
within a round, and the packages that it goes to, by `python -X importtime`. The first step is timed with the compile
cache that the run before filled (the goal is less than 6 s). The last line is a JSON object.
"""

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEER, OURS = "import jax", "from transformer import CausalLM"
WAYS = (PEER, "import jax, flax.linen", OURS)
GOAL = 0.5  # seconds beyond jax
RECIPE = "configs/number_words.py"
FIRST_STEP_GOAL = 6.0  # seconds
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jaxtyping")
# import time: self [us] | cumulative | two blanks for each level, and the name
IMPORT = re.compile(r"^import time: +(\d+) \| +(\d+) \| ( *)(\S+)$", re.MULTILINE)

Times = tuple[float, float]
"""wall and CPU seconds"""


def run_python(*arguments: str) -> str:
    """Runs this Python in a process of its own, in the folder of the package; returns what it wrote on stderr."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stderr


def measure(statement: str) -> Times:
    """A process that runs the statement, from its start to its end."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run_python("-c", statement)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def medians(rounds: Iterable[dict[str, Times]]) -> dict[str, Times]:
    """For each way, the median of its wall times and that of its CPU times."""
    collected: dict[str, list[Times]] = defaultdict(list)
    for times in rounds:
        for way, pair in times.items():
            collected[way].append(pair)
    return {way: tuple(map(statistics.median, zip(*pairs, strict=True))) for way, pairs in collected.items()}


def beyond_peer(times: dict[str, Times]) -> dict[str, Times]:
    """How much longer than the peer each way took in one round."""
    peer = times[PEER]
    return {way: (wall - peer[0], cpu - peer[1]) for way, (wall, cpu) in times.items()}


def table(found: dict[str, Times], beyond: dict[str, Times]) -> str:
    """A line for each way: seconds, and how much more than the peer."""
    lines = [f"{'':34} {'wall s':>8} {'CPU s':>8} {'beyond jax: wall s':>20} {'CPU s':>8}"]
    for way, (wall, cpu) in found.items():
        lines.append(f"{way:34} {wall:8.3f} {cpu:8.3f} {beyond[way][0]:20.3f} {beyond[way][1]:8.3f}")
    return "\n".join(lines)


def contributors(importtime: str, after: str = "jax") -> list[tuple[str, float]]:
    """(package, seconds) from what `-X importtime` wrote: what was imported after a package, the slowest first.

    A module counts for its own package, without what it imports in turn.
    """
    modules = [(name, int(own)) for own, _, _, name in IMPORT.findall(importtime)]
    names = [name for name, _ in modules]
    if after not in names:
        raise ValueError(f"expected a line about the import of {after}, got {len(names)} lines without one.")
    seconds: dict[str, float] = defaultdict(float)
    for name, own in modules[names.index(after) + 1 :]:  # a module is written once all that it imports is
        seconds[name.partition(".")[0]] += own / 1e6
    return sorted(seconds.items(), key=lambda item: -item[1])


def first_step() -> float:
    """Seconds from the start of a process that trains the default recipe to the line that tells of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "train.py",
            RECIPE,
            "--workdir",
            f"{folder}/run",
            "--logging.every",
            "1",
            "--logging.progress",
            "lines",
        ]
        start = time.perf_counter()
        with subprocess.Popen([sys.executable, "-u", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if line.startswith("step 1/"):
                    seconds = time.perf_counter() - start
                    process.kill()
                    return seconds
    raise RuntimeError("train.py ended before its first step; it said why above.")


def machine() -> str:
    """Processor, cores that this process may use, and how busy they are."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else []
    name = names[0] if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, load average {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="processes of each way; the ways take turns")
    parser.add_argument("--steps-only", action="store_true", help="time the first step alone")
    options = parser.parse_args()
    where, versions = machine(), {name: metadata.version(name) for name in PACKAGES}
    print(f"{where}, Python {platform.python_version()}, jax {versions['jax']}, flax {versions['flax']}")
    first_step()  # fills the compile cache
    steps = [first_step() for _ in range(3)]
    first = statistics.median(steps)
    verdict = "under" if first < FIRST_STEP_GOAL else "NOT under"
    print(f"first step of {RECIPE}, warm compile cache: {first:.2f} s, {verdict} {FIRST_STEP_GOAL:g} s")
    if options.steps_only:
        print(json.dumps({"work": f"first step of {RECIPE}", "ours": round(first, 2), "unit": "s", "machine": where}))
        return
    for way in WAYS:  # files into the cache, bytecode onto the disk
        measure(way)
    rounds = [{way: measure(way) for way in WAYS} for _ in range(options.rounds)]
    found, beyond = medians(rounds), medians(map(beyond_peer, rounds))
    print(table(found, beyond))
    verdicts = [
        f"{'under' if seconds < GOAL else 'NOT under'} {GOAL} s of {clock}"
        for seconds, clock in zip(beyond[OURS], ("wall time", "CPU time"), strict=True)
    ]
    print(f"\nbeyond jax: {', '.join(verdicts)}\n")
    print(f"{'package':34} {'s of its own modules':>20}")
    for package, seconds in contributors(run_python("-X", "importtime", "-c", f"{PEER}; {OURS}"))[:10]:
        print(f"{package:34} {seconds:20.3f}")
    ours, peer = found[OURS][0], found[PEER][0]
    print(
        json.dumps(
            {
                "work": f"{OURS}, beside {PEER}",
                "peer": round(peer, 3),
                "ours": round(ours, 3),
                "ratio": round(ours / peer, 2),
                "unit": "s of wall time",
                "first_step": round(first, 2),
                "beyond_peer": {clock: round(s, 3) for clock, s in zip(("wall", "cpu"), beyond[OURS], strict=True)},
                "machine": where,
                "versions": {"python": platform.python_version(), **versions},
            }
        )
    )


if __name__ == "__main__":
    main()
