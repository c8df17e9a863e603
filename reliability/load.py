"""Serve 64 clients for half an hour: every answer must be complete, and the memory of the server must not grow.

Usage: python -m reliability.load --minutes 30 --clients 64
       python -m reliability.load --output docs/load.json    also write the results, and the table in reliability.md

The server runs in its own process, with a small Llama of random weights. Each client sends a chat request, reads its
stream, and sends the next one; lengths are like those of ShareGPT (`benchmarks.serving_http`). For one request in
twenty, the client disconnects after a few tokens. Every other answer must be complete. At the end, the server gets
SIGTERM while requests run: it must finish them and exit. `reliability.soak` measures a run in the same way. The exit
code is 1 if a limit is exceeded or an answer is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reliability.page import load_table, put
from reliability.soak import PAGE, VARIABLES, Watch, checked_page
from reliability.steady import Measure, Sample, memory_measures, requests_measures

if TYPE_CHECKING:
    from benchmarks.serving_http import Ask

LONGEST = 256
"""maximum tokens of a request, prompt and answer together"""
LEFT = 20
"""one request in this many is left by its client"""
EVERY = 5.0
"""mean number of seconds between two samples"""
LEAST_MINUTES = 1.0
ARRIVAL_SECONDS = 1.0
"""seconds in which the last requests arrive, before SIGTERM: then the server accepts no more connections"""


@dataclass
class Seen:
    """What the clients saw."""

    answered: list[tuple[float, float]] = field(default_factory=list)
    """of each complete answer: when it ended, in seconds since the start, and the seconds to its first token"""
    left: int = 0
    """requests that their clients left"""
    lost: list[str] = field(default_factory=list)
    """answers that are missing or not complete, and why"""


def wishes(number: int) -> Iterator[Ask]:
    """Yield requests of a client without end."""
    from benchmarks.serving_http import asks

    for turn in itertools.count():
        yield from asks(100, LONGEST, seed=number + turn * 1_000)


async def client(url: str, number: int, ends: float, start: float, seen: Seen) -> None:
    """Send requests one after another until `ends` (`time.monotonic`)."""
    import openai

    rng = random.Random(number)
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=5, timeout=900) as connection:
        for one in wishes(number):
            if time.monotonic() >= ends:
                return
            leaves, began, first, usage, reason = rng.randrange(LEFT) == 0, time.monotonic(), None, None, None
            try:
                stream = await connection.chat.completions.create(
                    model="llama",
                    messages=[{"role": "user", "content": one.prompt}],
                    max_tokens=one.tokens,
                    seed=number,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for part in stream:
                    first, usage = first or time.monotonic(), part.usage or usage
                    reason = (part.choices[0].finish_reason if part.choices else None) or reason
                    if leaves and part.choices:
                        await stream.close()
                        break
            except openai.OpenAIError as error:
                seen.lost.append(f"{type(error).__name__}: {str(error)[:200]}")
                continue
            complete = usage is not None and (reason == "stop" or usage.completion_tokens == one.tokens)
            if leaves:
                seen.left += 1
            elif complete:
                seen.answered.append((time.monotonic() - start, first - began))
            else:
                seen.lost.append(f"finish_reason {reason}, usage {usage}, wanted {one.tokens} tokens")


async def clients(
    url: str, count: int, minutes: float, every: float, watch: Watch, seen: Seen, process: Any
) -> list[Sample]:
    """Run all clients, sample the server, and stop it while the last requests run."""
    start = time.monotonic()
    ends, samples, rng = start + 60 * minutes, [], random.Random(0)
    running = [asyncio.create_task(client(url, number, ends, start, seen)) for number in range(count)]
    while time.monotonic() < ends and process.poll() is None:
        await asyncio.sleep(min(every * rng.uniform(0.5, 1.5), max(ends - time.monotonic(), 0)))
        with watch.metrics.open("a") as file:
            print(json.dumps({"step": len(seen.answered)}), file=file)
        try:
            samples.append(watch.look())
        except OSError:
            break  # the server has ended; its exit code is checked
    await asyncio.sleep(ARRIVAL_SECONDS)
    process.send_signal(signal.SIGTERM)
    await asyncio.gather(*running)
    return samples


def serve(
    folder: Path, minutes: float, count: int, slots: int, every: float = EVERY
) -> tuple[list[Sample], list[str], Seen, list[str]]:
    """Return the samples, the names of programs compiled late, what the clients saw, and the faults of the server.

    Args:
        folder: working directory.
        minutes: duration.
        count: number of clients.
        slots: number of texts that the server generates at a time.
        every: mean number of seconds between samples.
    """
    from benchmarks.serving_http import free_port, wait_for, write_model

    write_model(folder / "llama", small=True, longest=LONGEST)
    port, inside, workdir, seen = free_port(), folder / "inside.jsonl", folder, Seen()
    words = ["serve", str(folder / "llama"), "--port", str(port), "--slots", str(slots), "--max-tokens", str(LONGEST)]
    program = str(Path(__file__).resolve().parent.parent / "transformer" / "__main__.py")
    command = [sys.executable, "-m", "reliability.monitored", str(inside), program, *words]
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | VARIABLES)
        try:
            wait_for(process, port, command, folder / "log.txt")
            watch, began = Watch(process.pid, time.monotonic(), workdir, inside), time.monotonic()
            samples = asyncio.run(clients(f"http://127.0.0.1:{port}/v1", count, minutes, every, watch, seen, process))
            code = process.wait(120)
        finally:
            process.kill()
            process.wait()
    text = (folder / "log.txt").read_text(errors="replace")
    faults = [f"printed: {line}" for line in text.splitlines() if "Traceback" in line]
    if code != 0:
        faults.append(f"exit code {code}")
    late = [name for when, name in watch.programs if when - began > 60 * minutes / 4]
    return samples, late, seen, faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, sample and check the limits; return the exit code. `arguments` None: those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64, help="requests at a time")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--output", type=Path, help=f".json file for the results, in the directory of {PAGE}")
    options = parser.parse_args(arguments)
    if options.minutes < LEAST_MINUTES or min(options.clients, options.slots) < 1:
        parser.error(f"--minutes must be at least {LEAST_MINUTES:g}, --clients and --slots at least 1.")
    page = checked_page(parser, options.output, "load")
    from benchmarks.machine import machine

    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        samples, late, seen, faults = serve(Path(folder), options.minutes, options.clients, options.slots)
    try:
        rows = [*memory_measures(samples, late), *requests_measures(samples, seen.answered)]
    except ValueError as error:
        print(f"failed: {'; '.join([str(error), *faults, *seen.lost[:5]])}", file=sys.stderr)
        return 1
    result = record(options, samples, rows, seen, faults, machine())
    table = load_table(result)
    print(table)
    if page:
        options.output.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
        page.write_text(put(page.read_text(encoding="utf-8"), "load", table), encoding="utf-8")
    failed = [*faults, *seen.lost[:5], *(row.what for row in rows if row.failed)]
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def record(
    options: Any, samples: Sequence[Sample], rows: Sequence[Measure], seen: Seen, faults: list[str], where: str
) -> dict[str, Any]:
    """Return the results as JSON values."""
    return {
        "date": date.today().isoformat(),
        "machine": where,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("jax", "starlette")},
        "minutes": options.minutes,
        "clients": options.clients,
        "slots": options.slots,
        "answered": len(seen.answered),
        "left": seen.left,
        "lost": seen.lost[:20],
        "faults": faults,
        "seconds": round(samples[-1].seconds),
        "measures": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
