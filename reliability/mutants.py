"""Change one place of the package at a time, and check that a test fails: mutation testing (DeMillo et al. 1978).

Usage: python -m reliability.mutants --count 200 --seed 0
       python -m reliability.mutants --only transformer/nn/_masks.py --count 20
       python -m reliability.mutants --output docs/reliability.md       also write the table into the page
       python -m reliability.mutants --planted reliability/planted.json      faults that were written by hand

Each mutant has one changed comparison, operator, constant or condition, or lacks one call. It runs in a copy of the
checkout against test files that import the changed file, nearest and most similar first, until a test fails. A mutant
that no test notices is a survivor: write a test, or give the reason in `reliability/surviving_mutants.json` if no test
can exist, because the changed program does the same.

The exit code is 1 if a survivor has no reason.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from reliability.imports import nearest_tests
from reliability.page import put, where

ROOT = Path(__file__).resolve().parent.parent
REASONS = "reliability/surviving_mutants.json"
ROOMS = {
    "nn": ["transformer/nn"],
    "generate": ["transformer/generate"],
    "training": [
        "transformer/training/_step.py",
        *(f"transformer/training/tasks/{name}.py" for name in ("_losses", "_preference", "_policy_gradient")),
    ],
    "chat": ["transformer/chat"],
    "serve": ["transformer/serve"],
    "weights": ["transformer/zoo/weights"],
}
"""the code that is mutated, by the names in the table"""
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
UNTESTED = ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom
"""code that is not mutated: the wording of errors, formatted texts and imports"""


@dataclass(frozen=True)
class Mutant:
    """One change: lines and columns are those of the original text, columns in bytes."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str
    tests: tuple[str, ...] = ()
    """test files that run first"""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"

    def apply(self, text: str) -> str:
        """Return the changed text of the file."""
        lines = text.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        data = text.encode()
        return (data[:start] + self.after.encode() + data[end:]).decode()


def mutants(path: str, text: str) -> list[Mutant]:
    """Return all mutants of a file."""
    found = []
    for node in _executed(ast.parse(text)):
        for changed in _changes(node):
            before = ast.get_source_segment(text, node) or ""
            after = ast.unparse(ast.fix_missing_locations(changed))
            if isinstance(node, ast.expr):
                after = f"({after})"
            place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            found.append(Mutant(path, *place, " ".join(before.split()), after))
    return found


def file_mutants(path: Path) -> list[Mutant]:
    return mutants(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that tests can cover: no annotations, decorators, docstrings or code for type checkers."""
    if isinstance(node, UNTESTED):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: an assertion
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _executed(child)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the changed versions of one node."""

    def replaced(**fields: Any) -> ast.AST:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed

    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield replaced(ops=[COMPARISONS[type(operator)]()])
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OPERATORS:
            if not _is_text(node):
                yield replaced(op=OPERATORS[type(operator)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.IfExp(test=test):
            yield replaced(test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value if value else 1.0)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))


def _is_text(node: ast.AST) -> bool:
    """Return whether an operator joins texts, or types in an expression such as `int | None`."""
    values = [getattr(part, "value", None) if isinstance(part, ast.Constant) else part for part in ast.walk(node)]
    return any(value is None or isinstance(value, str | ast.JoinedStr) for value in values)


def sample(rooms: Iterable[str], count: int, seed: int, only: str | None = None) -> list[Mutant]:
    """Draw mutants without replacement, in equal numbers of each room."""
    drawn, rooms = [], list(rooms)
    for place, room in enumerate(rooms):
        paths = [path for name in ROOMS[room] for path in _files(ROOT / name)]
        paths = [path for path in paths if only in (None, str(path.relative_to(ROOT)))]
        every = [
            one for path in paths for one in mutants(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        ]
        share = len(every) if only else count * (place + 1) // len(rooms) - count * place // len(rooms)
        drawn += random.Random(f"{seed} {room}").sample(every, min(share, len(every)))
    return drawn[:count] if only else drawn


def planted(file: Path) -> list[Mutant]:
    """Return the faults of a file that were written by hand.

    Each has a `path`, a line of this file without its indentation (`code`; `nth` of several equal ones, from 0), a part
    of the line (`before`), what replaces it (`after`), and the test files that run first (`tests`).

    Raises:
        ValueError: a line is no longer in the code; the message names all of them.
    """
    found, lost = [], []
    for fault in json.loads(file.read_text(encoding="utf-8")):
        lines = (ROOT / fault["path"]).read_text(encoding="utf-8").splitlines()
        places = [number for number, line in enumerate(lines, 1) if line.strip() == fault["code"]]
        places = places[fault["nth"] :][:1] if "nth" in fault else places
        if len(places) != 1 or fault["before"] not in fault["code"]:
            lost.append(f"{fault['path']}: {fault['code']}")
            continue
        line = lines[places[0] - 1]
        start = len(line[: line.index(fault["before"])].encode())
        end = start + len(fault["before"].encode())
        given = fault["before"], fault["after"], tuple(fault["tests"])
        found.append(Mutant(fault["path"], places[0], start, places[0], end, *given))
    if lost:
        listed = "".join(f"\n- {one}" for one in lost)
        raise ValueError(f"{file} has lines that are not once in the code. Correct or remove them:{listed}")
    return found


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def room_of(path: str) -> str:
    """Return the room of a file: one of `ROOMS`, or else its folder."""
    rooms = [
        room for room, names in ROOMS.items() if any(path == name or path.startswith(f"{name}/") for name in names)
    ]
    return rooms[0] if rooms else Path(path).parts[1]


def same_mutant(result: Mapping[str, Any]) -> Mutant | None:
    """Return the mutant of an earlier result; None if its line has changed, or is no longer mutated in this way."""
    path = ROOT / result["path"]
    lines = path.read_text(encoding="utf-8").splitlines()
    same = [
        one
        for one in file_mutants(path)
        if (one.before, one.after) == (result["before"], result["after"])
        and lines[one.line - 1].strip() == result["code"]
    ]
    return min(same, key=lambda one: abs(one.line - result["line"]), default=None)


def enclosing(text: str, line: int) -> str:
    """Return the code of the innermost function around a line, or the line itself."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    around = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds) and _reaches(node, line)]
    lines = text.splitlines()
    if not around:
        return lines[line - 1]
    function = max(around, key=lambda node: node.lineno)
    return "\n".join(lines[function.lineno - 1 : function.end_lineno])


def _reaches(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def run(mutant: Mutant, checkout: Path, most: int, seconds: float) -> dict[str, Any]:
    """Test a mutant in a copy of the checkout; return its description, the test that failed, and the time.

    The tests include those of tests/slow_tests.txt, unless the mutant names its tests: then they are default tests.

    Raises:
        RuntimeError: pytest rejects its arguments.
    """
    path = checkout / mutant.path
    original = path.read_text(encoding="utf-8")
    nearest = nearest_tests(checkout, mutant.path, most, enclosing(original, mutant.line))
    tests = list(dict.fromkeys([*mutant.tests, *nearest]))[: max(most, len(mutant.tests))]
    start = time.monotonic()
    killer = ""
    path.write_text(mutant.apply(original), encoding="utf-8")
    try:
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
        words += [*([] if mutant.tests else ["--ignore-slow-list"]), *tests]
        done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode == pytest.ExitCode.USAGE_ERROR:
            raise RuntimeError(f"pytest did not run: {done.stderr.strip()}")
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            killer = lines[0] if lines else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:  # an endless loop
        killer = f"no result within {seconds:.0f} s"
    finally:
        path.write_text(original, encoding="utf-8")
    return asdict(mutant) | {
        "name": mutant.name,
        "code": original.splitlines()[mutant.line - 1].strip(),
        "killer": killer,
        "seconds": time.monotonic() - start,
        "files": len(tests),
    }


def copy_checkout(folder: Path) -> Path:
    """Copy the files of the checkout that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def rows(results: Iterable[Mapping[str, Any]], reasons: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Count the mutants by room: all, killed, survivors with a reason, other survivors."""
    counted: dict[str, dict[str, int]] = {}
    for one in results:
        row = counted.setdefault(room_of(one["path"]), dict.fromkeys(("mutants", "killed", "same", "survived"), 0))
        row["mutants"] += 1
        row["killed" if one["killer"] else "same" if reason(one, reasons) else "survived"] += 1
    return counted


def reason(result: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return why no test can kill a mutant, or an empty text."""
    return reasons.get(f"{result['path']}: {result['code']}: {result['before']} -> {result['after']}", "")


def table(result: Mapping[str, Any]) -> str:
    """Return the results as Markdown: date and machine, one row per room, and the total."""
    counted = result["rows"]
    names = ("mutants", "killed", "same", "survived")
    total = {name: sum(row[name] for row in counted.values()) for name in names}
    how = f"`make mutants MUTANTS={result['count']}`, seed {result['seed']}"
    if result.get("planted"):
        how = f"`python -m reliability.mutants --planted {result['planted']}`"
    lines = [
        f"{where(result)}, {round(result['seconds'] / 60)} min: {how}.",
        "",
        "| code | mutants | killed | the same program | survived |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for room, row in {**counted, "all": total}.items():
        share = 100 * row["killed"] / max(1, row["mutants"] - row["same"])
        lines.append(
            f"| {room} | {row['mutants']} | {row['killed']} ({share:.0f} %) | {row['same']} | {row['survived']} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants; return 1 if a survivor has no reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of mutants (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample (default: 0)")
    parser.add_argument("--only", help="mutate this file only, such as transformer/nn/_masks.py")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="mutants at a time (default: one per core)")
    parser.add_argument("--tests", type=int, default=16, help="most test files per mutant (default: 16)")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a mutant (default: 300)")
    parser.add_argument("--record", type=Path, help="also write the mutants and failed tests into this file")
    parser.add_argument(
        "--again",
        type=Path,
        help="a file of --record: test only its survivors without a reason again, after new tests were written",
    )
    parser.add_argument("--planted", type=Path, help="a file of faults to test instead of a sample, see `planted`")
    parser.add_argument(
        "--output",
        type=Path,
        help="page with the marks <!-- mutants --> and <!-- end of mutants -->, such as docs/reliability.md",
    )
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count must be at least 1, got {options.count}")
    if options.only is not None and options.output:
        parser.error("--output writes the table of all code: leave out --only")
    if options.only is not None and not (ROOT / options.only).is_file():
        parser.error(f"--only must be a file of the package, relative to {ROOT}, got {options.only}")
    if options.again is not None and (options.only is not None or not options.again.is_file()):
        parser.error(f"--again must be a file of --record, without --only, got {options.again}")
    if options.planted is not None and (options.only or options.again or options.output):
        parser.error("--planted can't be combined with --only, --again and --output. Remove them.")
    rooms = ROOMS if options.only is None else [room_of(options.only)]
    before = 0.0
    results: list[dict[str, Any]] = []
    reasons = json.loads((ROOT / REASONS).read_text(encoding="utf-8"))
    if options.again:
        record = json.loads(options.again.read_text(encoding="utf-8"))
        survivors = [one for one in record["mutants"] if not one["killer"] and not reason(one, reasons)]
        before, results = record["seconds"], [one for one in record["mutants"] if one not in survivors]
        drawn = [found for one in survivors if (found := same_mutant(one))]
    elif options.planted:
        drawn = planted(options.planted)
    else:
        drawn = sample(rooms, options.count, options.seed, options.only)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        free = [copy_checkout(Path(folder) / str(worker)) for worker in range(options.workers)]

        def one(mutant: Mutant) -> dict[str, Any]:
            checkout = free.pop()
            try:
                return run(mutant, checkout, options.tests, options.seconds)
            finally:
                free.append(checkout)

        for future in concurrent.futures.as_completed([pool.submit(one, mutant) for mutant in drawn]):
            result = future.result()
            results.append(result)
            print(
                f"{'killed' if result['killer'] else 'SURVIVED'} {result['seconds']:.0f} s {result['name']}", flush=True
            )
            if options.record:
                record = {"seconds": before + time.monotonic() - start, "mutants": results}
                options.record.write_text(json.dumps(record, indent=1), encoding="utf-8")

    from benchmarks.machine import machine

    result = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("pytest", "jax")},
        "count": options.count,
        "seed": options.seed,
        "planted": options.planted and str(options.planted),
        "seconds": before + time.monotonic() - start,
        "rows": rows(results, reasons),
    }
    print(f"\n{table(result)}")
    survivors = [one for one in results if not one["killer"] and not reason(one, reasons)]
    for one in survivors:
        print(f"survived: {one['name']}")
    if options.output:
        options.output.write_text(
            put(options.output.read_text(encoding="utf-8"), "mutants", table(result)), encoding="utf-8"
        )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
