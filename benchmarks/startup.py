"""Import time of `from transformer import CausalLM`, compared with `import jax` and `import jax, flax.linen`. Also the
time from the start of `train.py` with the default recipe to its first step.

Usage: python -m benchmarks.startup [--rounds 11] [--steps-only]

Prints medians in seconds of new processes: wall-clock time and CPU time (user + system). On a busy machine the CPU time
varies less. Also prints the additional time compared with jax (goal: less than 0.5 s), as the median of the differences
within a round, and the packages that take it, measured with `python -X importtime`. The first step is measured with the
compilation cache of an earlier run (goal: less than 6 s). The last line is a JSON object.
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
GOAL = 0.5  # seconds more than jax
RECIPE = "configs/number_words.py"
FIRST_STEP_GOAL = 6.0  # seconds
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jaxtyping")
# Format: import time: self [us] | cumulative | two spaces per nesting level, then the name
IMPORT = re.compile(r"^import time: +(\d+) \| +(\d+) \| ( *)(\S+)$", re.MULTILINE)

Times = tuple[float, float]
"""wall and CPU seconds"""


def run_python(*arguments: str) -> str:
    """Run this Python in a new process in the root of the repository, and return its stderr."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stderr


def measure(statement: str) -> Times:
    """Return the times of a new process that runs the statement."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run_python("-c", statement)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def medians(rounds: Iterable[dict[str, Times]]) -> dict[str, Times]:
    """Return the median wall time and the median CPU time of each statement."""
    collected: dict[str, list[Times]] = defaultdict(list)
    for times in rounds:
        for way, pair in times.items():
            collected[way].append(pair)
    return {way: tuple(map(statistics.median, zip(*pairs, strict=True))) for way, pairs in collected.items()}


def beyond_peer(times: dict[str, Times]) -> dict[str, Times]:
    """Return how much longer than the peer each statement took in one round."""
    peer = times[PEER]
    return {way: (wall - peer[0], cpu - peer[1]) for way, (wall, cpu) in times.items()}


def table(found: dict[str, Times], beyond: dict[str, Times]) -> str:
    """Return a table with one line per statement: seconds, and additional seconds compared with the peer."""
    lines = [f"{'':34} {'wall s':>8} {'CPU s':>8} {'more than jax: wall s':>22} {'CPU s':>8}"]
    for way, (wall, cpu) in found.items():
        lines.append(f"{way:34} {wall:8.3f} {cpu:8.3f} {beyond[way][0]:22.3f} {beyond[way][1]:8.3f}")
    return "\n".join(lines)


def contributors(importtime: str, after: str = "jax") -> list[tuple[str, float]]:
    """Return (package, seconds) of all packages imported after the package `after`, the slowest first.

    The time of a module counts for its own package, without the modules that it imports.

    Args:
        importtime: output of `python -X importtime`.
        after: package after which the count starts.

    Raises:
        ValueError: the output has no line for `after`.
    """
    modules = [(name, int(own)) for own, _, _, name in IMPORT.findall(importtime)]
    names = [name for name, _ in modules]
    if after not in names:
        raise ValueError(f"expected a line for the import of {after}, got {len(names)} lines without one.")
    seconds: dict[str, float] = defaultdict(float)
    for name, own in modules[names.index(after) + 1 :]:  # a module is listed after the modules that it imports
        seconds[name.partition(".")[0]] += own / 1e6
    return sorted(seconds.items(), key=lambda item: -item[1])


def first_step() -> float:
    """Return the seconds from the start of a training process to the line that reports its first step."""
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
    raise RuntimeError("train.py ended before its first step; see its output above.")


def machine() -> str:
    """Return processor, number of cores available to this process, and load average."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else []
    name = names[0] if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, load average {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="processes per statement; the statements take turns")
    parser.add_argument("--steps-only", action="store_true", help="measure only the time to the first step")
    options = parser.parse_args()
    where, versions = machine(), {name: metadata.version(name) for name in PACKAGES}
    print(f"{where}, Python {platform.python_version()}, jax {versions['jax']}, flax {versions['flax']}")
    first_step()  # fills the compilation cache
    steps = [first_step() for _ in range(3)]
    first = statistics.median(steps)
    verdict = "below" if first < FIRST_STEP_GOAL else "NOT below"
    print(f"first step of {RECIPE}, warm compilation cache: {first:.2f} s, {verdict} {FIRST_STEP_GOAL:g} s")
    if options.steps_only:
        print(json.dumps({"work": f"first step of {RECIPE}", "ours": round(first, 2), "unit": "s", "machine": where}))
        return
    for way in WAYS:  # fills the file cache, and writes the bytecode
        measure(way)
    rounds = [{way: measure(way) for way in WAYS} for _ in range(options.rounds)]
    found, beyond = medians(rounds), medians(map(beyond_peer, rounds))
    print(table(found, beyond))
    verdicts = [
        f"{'below' if seconds < GOAL else 'NOT below'} {GOAL} s of {clock}"
        for seconds, clock in zip(beyond[OURS], ("wall time", "CPU time"), strict=True)
    ]
    print(f"\nmore than jax: {', '.join(verdicts)}\n")
    print(f"{'package':34} {'s in its own modules':>20}")
    for package, seconds in contributors(run_python("-X", "importtime", "-c", f"{PEER}; {OURS}"))[:10]:
        print(f"{package:34} {seconds:20.3f}")
    ours, peer = found[OURS][0], found[PEER][0]
    print(
        json.dumps(
            {
                "work": f"{OURS}, compared with {PEER}",
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
