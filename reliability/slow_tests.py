"""Choose which tests are slow, so that the default tests execute the same lines and branches in less time.

Usage: python -m reliability.slow_tests measure FOLDER    (runs the tests, in about 25 minutes on two cores)
       python -m reliability.slow_tests choose FOLDER     (writes tests/slow_tests.txt)
       python -m reliability.slow_tests table FOLDER...   (prints the coverage of each folder of the package)

A costly test whose lines and branches other default tests also execute is listed in tests/slow_tests.txt, and so it is
slow. Of a test function that costs little, at least one case stays. A test that is the first to need a shared fixture
or program takes longer, so the times change with the list: with --add, both actions keep the listed tests and look for
more. Files whose tests notice planted faults (reliability/planted.json) keep their part of the list. `measure` needs
coverage.py: pip install "coverage>=7.10".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "slow_tests.txt"
MEASURED = "TRANSFORMER_MEASURED_TESTS"
"""environment variable: folder to which the workers of pytest write CPU times"""
PLANTED = ROOT / "reliability" / "planted.json"
"""planted faults, with the files of tests that must notice each of them"""
COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")
"""counts of a file in the JSON report of coverage.py"""
HEADING = """\
# Default tests that are slow instead, because other default tests execute the same lines and branches of the package.
# A name without [case] stands for all cases. `python -m reliability.slow_tests` writes this file.
"""


class Arc(NamedTuple):
    """A step from one line to another, as coverage.py measures branches; a negative line: entry or exit."""

    file: str
    start: int
    end: int


def watchful_files() -> set[str]:
    """Return the test files that notice planted faults: another test can execute the same lines and notice nothing."""
    return {name for fault in json.loads(PLANTED.read_text(encoding="utf-8")) for name in fault["tests"]}


def _file(test: str) -> str:
    return test.partition("::")[0]


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds of this process, and of processes that it has started and that have ended."""
    times = os.times()
    return times.user + times.system, times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Record the arcs and the CPU seconds of a test. This module is a pytest plugin while `measure` runs."""
    import coverage

    measurement, before = coverage.Coverage.current(), _cpu_seconds()
    if measurement:
        measurement.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        if measurement:
            measurement.switch_context("")
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        with open(Path(os.environ[MEASURED]) / f"seconds.{worker}", "a", encoding="utf-8") as file:
            own, started = (round(after - start, 3) for after, start in zip(_cpu_seconds(), before, strict=True))
            file.write(json.dumps([item.nodeid, own, started]) + "\n")


def listed_tests() -> list[str]:
    """Return the names in the list."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def measure(folder: Path, add: bool) -> int:
    """Run the default tests, with the listed ones unless `add`, and return the exit status of pytest."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "coveragerc"
    settings.write_text(
        "[run]\nbranch = True\nparallel = True\nsource_pkgs = transformer\nsigterm = True\n"
        f"data_file = {folder / 'data'}\npatch = subprocess\nconcurrency = thread,multiprocessing\n"
        f"[paths]\nsource =\n    {ROOT / 'transformer'}\n    */transformer\n",  # the tests also run copies of it
        encoding="utf-8",
    )
    environment = os.environ | {
        MEASURED: str(folder),
        "COVERAGE_PROCESS_START": str(settings),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    coverage = [sys.executable, "-m", "coverage"]
    words = ["-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", "-p", "no:cacheprovider"]
    words += ["-p", "reliability.slow_tests", *([] if add else ["--ignore-slow-list"])]
    status = subprocess.run([*coverage, "run", f"--rcfile={settings}", *words], cwd=ROOT, env=environment).returncode
    return subprocess.run([*coverage, "combine", f"--rcfile={settings}"], cwd=ROOT).returncode or status


def arcs_of(folder: Path) -> dict[Arc, frozenset[str]]:
    """Return the tests that execute each arc; "" stands for imports and for started processes.

    The tests also run copies of the package, so a file is named by its path from `transformer/` on.
    """
    import sqlite3  # coverage.py documents the tables of its data file

    found: dict[Arc, set[str]] = defaultdict(set)
    with closing(sqlite3.connect(folder / "data")) as database:
        rows = database.execute(
            "select path, fromno, tono, context from arc join file on file_id = file.id"
            " join context on context_id = context.id"
        )
        for path, start, end, test in rows:
            name = path.rpartition("/transformer/")[2]
            if name != path:
                found[Arc(name, start, end)].add(test)
    return {arc: frozenset(tests) for arc, tests in found.items()}


def seconds_of(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of each test, without those that start processes.

    What a process executes is not recorded for the test that started it, so no such test can be listed.
    """
    lines = (line for path in folder.glob("seconds.*") for line in path.read_text(encoding="utf-8").splitlines())
    return {test: own for test, own, started in map(json.loads, lines) if started < 0.1}


def choose(
    arcs: Mapping[Arc, Set[str]], seconds: Mapping[str, float], least: float = 0.15, most: float = 0.4
) -> list[str]:
    """Return the tests to list, costliest first. Without them, the other tests still execute all arcs.

    Args:
        arcs: the tests that execute each arc.
        seconds: CPU seconds of each test.
        least: a test that takes less time is never listed.
        most: the last case of a test function is listed only if it takes more time than this.
    """
    executed: dict[str, list[Arc]] = defaultdict(list)
    for arc, tests in arcs.items():
        for test in tests:
            executed[test].append(arc)
    remaining = {arc: len(tests) for arc, tests in arcs.items()}
    cases = Counter(_function(test) for test in seconds)
    listed = []
    for test in sorted(seconds, key=lambda test: (-seconds[test], test)):
        if seconds[test] < least:
            break
        alone = cases[_function(test)] == 1
        if not executed[test]:  # it checks the source, or another process: nothing to compare
            continue
        if (alone and seconds[test] <= most) or any(remaining[arc] == 1 for arc in executed[test]):
            continue
        for arc in executed[test]:
            remaining[arc] -= 1
        cases[_function(test)] -= 1
        listed.append(test)
    return listed


def choose_elsewhere(
    arcs: Mapping[Arc, Set[str]], seconds: Mapping[str, float], now: Set[str], files: Set[str]
) -> tuple[list[str], set[str]]:
    """Return `choose` for the tests outside of some files, and the names `now` in the list that are in these files."""
    kept = {name for name in now if _file(name) in files}
    left = {arc: frozenset(test for test in tests if not {test, _function(test)} & kept) for arc, tests in arcs.items()}
    return choose(left, {test: spent for test, spent in seconds.items() if _file(test) not in files}), kept


def written(listed: list[str], seconds: Mapping[str, float], before: Set[str] = frozenset()) -> str:
    """Return the text of the list: the names `before`, and `listed`.

    A function stands for its cases if all that were measured are listed.
    """
    cases, chosen = Counter(map(_function, seconds)), Counter(map(_function, listed))
    names = {_function(test) if chosen[_function(test)] == cases[_function(test)] else test for test in listed}
    names |= {name for name in before if _function(name) not in names}
    return HEADING + "".join(f"{name}\n" for name in sorted(names))


def _function(test: str) -> str:
    return test.partition("[")[0]


def table(folders: list[Path]) -> str:
    """Return a Markdown table: executed lines and branches of each folder of the package, for each measurement."""
    columns = [_shares(folder) for folder in folders]
    names = "".join(f" {folder.name}: lines | {folder.name}: branches |" for folder in folders)
    rows = [f"| folder |{names}", "| --- |" + " ---: | ---: |" * len(folders)]
    for room in sorted(set().union(*columns), key=lambda room: (room == "all", room)):
        cells = (f" {part:.2f} % |" for column in columns for part in column.get(room, (0.0, 0.0)))
        rows.append(f"| {room} |" + "".join(cells))
    return "\n".join(rows) + "\n"


def _shares(folder: Path) -> dict[str, tuple[float, float]]:
    """Return the executed lines and branches of each folder of the package, in percent."""
    import coverage

    measurement = coverage.Coverage(data_file=str(folder / "data"), config_file=False)
    measurement.load()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for copies of the package that tests made and deleted
        report = Path(place) / "report.json"
        measurement.json_report(outfile=str(report), ignore_errors=True)
        files = json.loads(report.read_text(encoding="utf-8"))["files"]
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for path, found in files.items():
        name = path.rpartition("transformer/")[2]
        for room in (name.partition("/")[0] if "/" in name else "top level", "all"):
            sums[room].update({key: found["summary"][key] for key in COUNTS})
    return {
        room: (
            100 * found[lines] / found[all_lines],
            100 * found[branches] / found[all_branches] if found[all_branches] else 100.0,
        )
        for lines, all_lines, branches, all_branches in [COUNTS]
        for room, found in sums.items()
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["measure", "choose", "table"])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--add", action="store_true", help="keep the tests that are listed, and look for more")
    options = parser.parse_args(arguments)
    folders = [folder.resolve() for folder in options.folders]
    if options.action == "measure":
        return measure(folders[0], options.add)
    for folder in folders:
        if not (folder / "data").exists():
            parser.error(f"{folder} has no measurement: run `python -m reliability.slow_tests measure {folder}` first")
    if options.action == "table":
        print(table(folders), end="")
        return 0
    seconds, before = seconds_of(folders[0]), set(listed_tests())
    listed, kept = choose_elsewhere(arcs_of(folders[0]), seconds, before, watchful_files())
    before = before if options.add else kept
    LIST.write_text(written(listed, seconds, before), encoding="utf-8")
    moved, whole = sum(seconds[test] for test in listed), sum(seconds.values())
    print(f"{LIST}: {len(listed)} of {len(seconds)} tests, with {moved:.0f} of {whole:.0f} CPU seconds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
