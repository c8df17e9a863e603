"""Run the tests that changed, and the slowest ones, several times in random order on a busy machine.

Usage: python -m reliability.flaky --since main~3 --times 5

A test that waits for a number of seconds instead of an event, or that depends on the order of the tests, fails in one
of these runs before it fails for somebody else. Meanwhile one process computes without a pause, to keep one core
busy. The exit code is 1 if any run failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from reliability.imports import distances

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / ".pytest_cache/v/transformer/durations"
"""seconds of each default test in its last run; tests/conftest.py writes this file"""


def changed_tests(revision: str, root: Path = ROOT) -> list[str]:
    """Return the test files that changed since a revision, and those that import a changed helper of the tests."""
    words = ["git", "diff", "--name-only", "--diff-filter=d", revision, "--", "tests"]
    names = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    changed = {root / name for name in names if name.endswith(".py")}
    tests = sorted((root / "tests").rglob("test_*.py"))
    return [str(test.relative_to(root)) for test in tests if changed & distances(test, root).keys()]


def slowest_tests(durations: dict[str, float], count: int) -> list[str]:
    """Return the node ids of the slowest tests, slowest first."""
    return sorted(durations, key=lambda name: -durations[name])[:count]


def main(arguments: list[str]) -> int:
    """Run the tests; return 1 if any run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="HEAD~1", help="revision to compare with (default: HEAD~1)")
    parser.add_argument("--slowest", type=int, default=40, help="number of slowest tests to add (default: 40)")
    parser.add_argument("--times", type=int, default=5, help="number of runs (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the first order (default: 0)")
    options = parser.parse_args(arguments)
    if options.times < 1:
        parser.error(f"--times must be at least 1, got {options.times}")
    if options.slowest and not DURATIONS.exists():
        parser.error(
            f"{DURATIONS} does not exist: run `make test` first, which records the durations, or pass --slowest 0"
        )
    tests = changed_tests(options.since)
    slowest = (
        slowest_tests(json.loads(DURATIONS.read_text(encoding="utf-8")), options.slowest) if options.slowest else []
    )
    tests += [name for name in slowest if name.partition("::")[0] not in tests]
    if not tests:
        print(f"no test has changed since {options.since}")
        return 0
    print(f"{len(tests)} test files and slow tests, {options.times} times beside a process that keeps one core busy")
    # A program of its own: a fork of this process would inherit its signal handlers, and could outlive `terminate`.
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    failed = 0
    try:
        for time in range(options.times):
            words = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--ignore-slow-list"]
            words += ["--shuffle", str(options.seed + time), *tests]
            failed += subprocess.run(words, cwd=ROOT, check=False).returncode != 0
    finally:
        busy.kill()
        busy.wait()
    print(f"{failed} of {options.times} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
