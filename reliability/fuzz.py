"""Run the fuzz tests (test_fuzz_*.py in tests/) with a number of cases, and print a table of the results.

Usage: python -m reliability.fuzz --cases 100000 --seed 0
       python -m reliability.fuzz --output docs/reliability.md            also write the table into the page

The exit code is 1 if any case crashed, hung, opened a forbidden file, or used too much time or memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from reliability.page import put, where

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("hypothesis", "jax", "tokenizers", "tyro")


def records(report: Path) -> list[dict[str, Any]]:
    """Return the records named "fuzz" that the tests wrote into a JUnit report."""
    properties = ElementTree.parse(report).iter("property")
    return [json.loads(one.attrib["value"]) for one in properties if one.attrib["name"] == "fuzz"]


def kinds(found: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Sum the records by kind of input (the longest case: maximum), sorted by descending number of cases."""
    sums: dict[str, dict[str, float]] = {}
    for one in found:
        row = sums.setdefault(one["kind"], {"cases": 0, "read": 0, "refused": 0, "longest": 0.0})
        row["cases"] += one["read"] + one["refused"]
        for name in ("read", "refused"):
            row[name] += one[name]
        row["longest"] = max(row["longest"], one["longest"])
    return dict(sorted(sums.items(), key=lambda item: -item[1]["cases"]))


def table(result: Mapping[str, Any]) -> str:
    """Return the results of `main` as Markdown: date and machine, one row per kind of input, and the total."""
    rows = result["kinds"]
    whole = {name: sum(row[name] for row in rows.values()) for name in ("cases", "read", "refused")}
    whole["longest"] = max((row["longest"] for row in rows.values()), default=0.0)
    lines = [
        f"{where(result)}, {round(result['seconds'] / 60)} min: "
        f"`make fuzz CASES={result['cases']}`, seed {result['seed']}. "
        f"{'Tests that failed: ' + str(result['failed']) if result['failed'] else 'Nothing failed'}; no process took "
        f"more than {round(result['peak'] / 2**20)} MiB.",
        "",
        "| input | cases | read | refused | longest case |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, row in {**rows, "all": whole}.items():
        lines.append(
            f"| {name} | {row['cases']:,} | {row['read']:,} | {row['refused']:,} | {1000 * row['longest']:.0f} ms |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the tests; return the exit code of pytest, which is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        type=int,
        default=100_000,
        help="total number of cases; each test has a fixed share (default: 100000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the cases (default: 0)")
    parser.add_argument("--workers", default="auto", help="number of processes, at most 4 (default: auto)")
    parser.add_argument(
        "--output",
        type=Path,
        help="page with the marks <!-- fuzz --> and <!-- end of fuzz -->, such as docs/reliability.md",
    )
    options = parser.parse_args(arguments)
    if options.cases < 1:
        parser.error(f"--cases must be at least 1, got {options.cases}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = sorted(str(path) for path in (ROOT / "tests").rglob("test_fuzz_*.py"))
        words = [sys.executable, "-m", "pytest", *tests, f"--hypothesis-seed={options.seed}", f"--junitxml={report}"]
        words += ["-o", "junit_family=xunit1", "-n", options.workers, "--maxprocesses", "4", "-p", "no:cacheprovider"]
        words += ["--ignore-slow-list"]
        status = subprocess.run(words, cwd=ROOT, env={**os.environ, "FUZZ_CASES": str(options.cases)}).returncode
        found = records(report)
        suites = ElementTree.parse(report).iter("testsuite")
        failed = sum(int(suite.attrib["failures"]) + int(suite.attrib["errors"]) for suite in suites)

    from benchmarks.machine import machine

    result = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in VERSIONS},
        "cases": options.cases,
        "seed": options.seed,
        "seconds": time.monotonic() - start,
        "peak": max((one["peak"] for one in found), default=0),
        "failed": failed,
        "kinds": kinds(found),
    }
    print(f"\n{table(result)}")
    if options.output and not status:
        options.output.write_text(
            put(options.output.read_text(encoding="utf-8"), "fuzz", table(result)), encoding="utf-8"
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
