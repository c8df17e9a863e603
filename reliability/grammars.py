"""Send thousands of random JSON schemas and regular expressions to a server, and check its time and memory limits.

Usage: python -m reliability.grammars --cases 5000 --seed 0
       python -m reliability.grammars --output docs/reliability.md     also write the table into the page

The server runs in its own process, with a small Llama of random weights. Schemas and expressions have bounds, factors,
repetitions and nesting from small to enormous; eight clients send them and read up to 24 tokens each. Every answer must
be a text or status 400, no answer may take longer than the limits allow, /health must answer, and no process of the
server may grow by more than 50 MB after the first 200 cases. The exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reliability.page import put, where

CLIENTS = 8
FIRST = 200
"""cases after which the size of the server is its usual one"""
MOST_SECONDS = 20.0
"""maximum time of an answer: other clients compile before it, 2 s each in two processes, and their texts"""
MOST_GROWTH = 50e6
"""bytes by which a process may grow"""
TOKENS = 24


def number(rng: random.Random, most_digits: int = 19) -> int:
    """Return an integer of 1 to `most_digits` digits, each number of digits with the same probability."""
    return rng.randint(0, 10 ** rng.randint(1, most_digits))


def expression(rng: random.Random, depth: int) -> str:
    """Return a regular expression."""
    if depth == 0:
        return rng.choice(["a", "[a-z]", ".", r"\d", r"\w", r"\p{L}", "é", "(?i:yes|no)", "[^a]", r"[\s\S]", "ab*"])
    inner = expression(rng, depth - 1)
    low = number(rng, rng.choice([1, 1, 2, 4]))
    return rng.choice(
        [
            lambda: f"({inner})*",
            lambda: f"({inner}){{{low},{low + number(rng, 3)}}}",
            lambda: f"({inner})?{expression(rng, depth - 1)}",
            lambda: f"({inner}|{expression(rng, depth - 1)})",
            lambda: f".*{inner}.{{{low}}}",
            lambda: "|".join(expression(rng, 0) + str(i) for i in range(rng.choice([3, 30, 300]))),
        ]
    )()


def schema(rng: random.Random, depth: int) -> Any:
    """Return a JSON schema."""
    leaves: list[Callable[[], Any]] = [
        lambda: {"type": "integer", "minimum": -number(rng), "maximum": number(rng)},
        lambda: {"type": rng.choice(["integer", "number"]), "multipleOf": number(rng, 10) + 1, "minimum": 0},
        lambda: {"type": "number", "multipleOf": rng.choice([0.01, 0.5, 1e-6, 0.123]), "maximum": number(rng)},
        lambda: {"type": "string", "minLength": number(rng, 4), "maxLength": 10**4 + number(rng, 8)},
        lambda: {"type": "string", "pattern": expression(rng, rng.randint(0, 3))},
        lambda: {"type": "string", "format": rng.choice(["date-time", "email", "uri", "uuid", "ipv6", "unknown"])},
        lambda: {"enum": [f"{i:x}" * rng.randint(1, 9) for i in range(rng.choice([2, 50, 1000]))]},
        lambda: {"type": rng.choice(["boolean", "null", "object", "array"])},
    ]
    if depth == 0:
        return rng.choice(leaves)()

    def inner() -> Any:
        return schema(rng, rng.randint(0, depth - 1))

    return rng.choice(
        [
            *leaves,
            lambda: {"type": "array", "items": inner(), "minItems": number(rng, 3), "maxItems": 10**3 + number(rng, 6)},
            lambda: {"anyOf": [inner() for _ in range(rng.choice([2, 5, 20]))]},
            lambda: {"allOf": [inner() for _ in range(rng.choice([2, 3, 8]))]},
            lambda: {"oneOf": [inner(), inner()]},
            lambda: {"type": "object", "properties": {f"p{i}": inner() for i in range(rng.choice([1, 5, 40]))}},
            lambda: {"type": "object", "additionalProperties": inner(), "minProperties": number(rng, 3)},
            lambda: {"$defs": {"a": inner()}, "type": "array", "items": {"$ref": "#/$defs/a"}},
            lambda: {"type": "array", "prefixItems": [inner() for _ in range(rng.choice([2, 30]))]},
        ]
    )()


def drawn(seed: int) -> dict[str, Any]:
    """Return the fields of a request: a schema or an expression."""
    rng = random.Random(seed)
    if rng.random() < 0.35:
        return {"guided_regex": expression(rng, rng.randint(1, 5))}
    return {"guided_json": schema(rng, rng.randint(0, 3))}


def post(port: int, body: Mapping[str, Any]) -> tuple[int, str]:
    """Send a text completion; return status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Watch(threading.Thread):
    """Samples the size of the processes of a server, and the time of /health, until `stop` is set."""

    def __init__(self, pid: int, port: int):
        super().__init__(daemon=True)
        self._pid, self._port = pid, port
        self.stop = threading.Event()
        self.sizes: dict[int, list[int]] = {}
        """bytes in use of each process, over time"""
        self.health: list[float] = []
        """seconds of each answer"""

    def run(self) -> None:
        """Sample."""
        while not self.stop.wait(0.05):
            children = Path(f"/proc/{self._pid}/task").glob("*/children")
            for pid in [self._pid, *(int(one) for path in children for one in _text(path).split())]:
                # A child that does not execute its program yet has the size of its parent.
                is_ours = pid == self._pid or "_limited_worker" in _text(Path(f"/proc/{pid}/cmdline"))
                if is_ours and (size := _text(Path(f"/proc/{pid}/statm")).split()):
                    self.sizes.setdefault(pid, []).append(int(size[1]) * 4096)
            began = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            connection.request("GET", "/health")
            connection.getresponse().read()
            connection.close()
            self.health.append(time.perf_counter() - began)


def _text(path: Path) -> str:
    """Return the content of a file of /proc; empty if the process has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def measure(cases: int, seed: int) -> dict[str, Any]:
    """Serve, send the cases, and return what was seen."""
    from benchmarks.serving_http import free_port, wait_for, write_model

    with tempfile.TemporaryDirectory(prefix="grammars-") as folder:
        write_model(Path(folder) / "llama", small=True, longest=256)
        port, log = free_port(), Path(folder) / "log.txt"
        command = [sys.executable, "-m", "transformer", "serve", f"{folder}/llama", "--port", str(port)]
        command += ["--max-tokens", "256", "--slots", "8"]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            wait_for(process, port, command, log)
            found = _send(process, port, cases, seed)
            process.terminate()
            found["code"] = process.wait(60)
        finally:
            process.kill()
            process.wait()
        found["log"] = log.read_text(errors="replace").splitlines()[1:]
    return found


def _send(process: subprocess.Popen, port: int, cases: int, seed: int) -> dict[str, Any]:
    outcomes: collections.Counter[str] = collections.Counter()
    seconds: list[float] = []
    faults: list[str] = []

    def one(case: int) -> None:
        fields, began = drawn(seed * 1_000_003 + case), time.perf_counter()
        try:
            status, text = post(port, {"prompt": "a", "max_tokens": TOKENS, "seed": case, **fields})
        except OSError as error:
            status, text = 0, type(error).__name__
        seconds.append(time.perf_counter() - began)
        outcome = "text" if status == 200 else "other"
        if status == 400:
            limits = {"seconds. Simplify": "limit of time", "MiB of memory": "limit of memory"}
            outcome = next((name for part, name in limits.items() if part in text), "refused by llguidance")
        elif status == 500 and "the text can't be continued" in text:
            outcome = "text ended by the limits of llguidance"
        outcomes[outcome] += 1
        if outcome == "other" or seconds[-1] > MOST_SECONDS:
            faults.append(f"case {case}: status {status}, {seconds[-1]:.1f} s, {text[:200]}, {str(fields)[:200]}")

    watch = Watch(process.pid, port)
    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(one, range(FIRST)))
        watch.start()
        time.sleep(1)
        list(threads.map(one, range(FIRST, cases)))
    watch.stop.set()
    watch.join()
    server = watch.sizes.pop(process.pid)
    usual = statistics.median(size for sizes in watch.sizes.values() for size in sizes)  # most of the time they wait
    children = [max(sizes) - usual for sizes in watch.sizes.values()]
    return {
        "outcomes": dict(outcomes),
        "faults": faults,
        "longest": max(seconds),
        "health": sorted(watch.health)[int(0.99 * len(watch.health))],
        "slowest_health": max(watch.health),
        "growth": max(server) - server[0],
        "children": len(children),
        "child_growth": max(children, default=0),
        "child_size": max((max(sizes) for sizes in watch.sizes.values()), default=0),
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"{where(result)}: `python -m reliability.grammars --cases {result['cases']}`, seed {result['seed']}, "
        f"{round(result['seconds'] / 60)} min.",
        "",
        "| result | cases |",
        "| --- | ---: |",
        *(f"| {name} | {count:,} |" for name, count in sorted(result["outcomes"].items(), key=lambda one: -one[1])),
        "",
        f"The longest answer took {result['longest']:.1f} s; /health took {1000 * result['health']:.0f} ms (99th "
        f"percentile) and at most {1000 * result['slowest_health']:.0f} ms. The server grew by "
        f"{result['growth'] / 1e6:.0f} MB; {result['children']} processes compiled, of at most "
        f"{result['child_size'] / 1e6:.0f} MB, and none grew by more than {result['child_growth'] / 1e6:.0f} MB.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print the table; return the exit code. `arguments` None: those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="page with the marks of this table")
    options = parser.parse_args(arguments)
    if options.cases <= FIRST:
        parser.error(f"--cases must be more than {FIRST}.")
    from benchmarks.machine import machine

    began = time.monotonic()
    result = measure(options.cases, options.seed)
    result |= {"cases": options.cases, "seed": options.seed, "seconds": time.monotonic() - began}
    result |= {"date": date.today().isoformat(), "machine": machine()}
    result["versions"] = {"python": platform.python_version(), "llguidance": version("llguidance")}
    print(table(result))
    if options.output:
        options.output.write_text(put(options.output.read_text("utf-8"), "grammars", table(result)), "utf-8")
    faults = [*result["faults"], *(f"printed: {line}" for line in result["log"])]
    faults += [f"exit code {result['code']}"] if result["code"] else []
    for name in ("growth", "child_growth"):
        faults += [f"{name}: {result[name] / 1e6:.0f} MB"] if result[name] > MOST_GROWTH else []
    for fault in faults[:20]:
        print(f"failed: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
