"""Benchmarks on one GPU, with PyTorch and transformers as peers: training, greedy decoding, attention, and a recipe.

Usage: python -m benchmarks.gpu [--parts bounds gpt2 ...] [--json FILE] [--seconds 420] [--data.manual-dir FOLDER]

Install PyTorch for CUDA and transformers first; a part whose packages are missing fails, and the others run. All parts
together take about 7 minutes on an H200. Each part runs in its own process group, one after another, and ends after
`--part-seconds`. --json FILE is written again after each measurement, so that it keeps the results of a run that is
interrupted. `--data.manual-dir` names a folder with input.txt, for the part `shakespeare` without network access.

bounds: the rates of this GPU, to which the other parts are compared: matrix multiplications of 8,192 x 8,192 random
bfloat16 matrices, and copies of 4 GiB (bytes read and written), 50 of which are enqueued before the program waits.
decode: greedy decoding of 128 tokens with the shape of Llama 3.2 1B, bfloat16, 1 and 16 rows. decode_static,
decode_dynamic: the same with transformers, with a static cache and torch.compile, and with a dynamic cache.
attention, attention_torch: causal attention in bfloat16, ours compared with the cuDNN and flash attention of PyTorch.
gpt2: a training step of GPT-2 124M, context 1,024, bfloat16, batch size 16, compared with PyTorch (torch.compile, flash
attention, autocast). llama_2048, llama_8192: a training step with the shape of Llama 3.2 1B. shakespeare: the recipe
configs/shakespeare_gpu.py.

Model FLOPs are 6 per matrix parameter and token, and 12 L T d_model / 2 per token for causal attention (Chowdhery et
al. 2022, arXiv 2204.02311, appendix B, causal half). `first` is the time of the first run, which compiles; no
compilation cache is used. The last line is a JSON object.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_parts
from benchmarks.gpu_parts import MODULE, PUBLISHED, Row
from benchmarks.side_by_side import ROOT, last_line, serve, versions

GRACE = 5.0
"""seconds between SIGTERM and SIGKILL"""


def shakespeare(words: Sequence[str]) -> Iterator[Row]:
    """Train configs/shakespeare_gpu.py, and return its lowest evaluation loss."""
    from transformer.viz import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "train.py", "configs/shakespeare_gpu.py", "--workdir", f"{folder}/run", *words]
        subprocess.run(command, cwd=ROOT, check=True)
        seconds = time.perf_counter() - start
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    loss = min(line["eval/loss"] for line in lines if "eval/loss" in line)
    compiled = sum(line.get("perf/compile_s", 0.0) for line in lines)
    yield gpu_parts.row("recipe shakespeare_gpu", "ours", seconds, compiled, loss, "nats")
    yield gpu_parts.row("recipe shakespeare_gpu", "nanoGPT's README", float("nan"), float("nan"), PUBLISHED, "nats")


PARTS: dict[str, tuple[Callable[[Sequence[str]], Iterator[Row]], float]] = {
    "bounds": (lambda _: gpu_parts.bounds(), 60),
    "attention": (lambda _: gpu_parts.attention(), 60),
    "attention_torch": (lambda _: gpu_parts.attention_torch(), 60),
    "decode": (lambda _: gpu_parts.decode(), 120),
    "decode_dynamic": (lambda _: gpu_parts.decode_torch("dynamic"), 60),
    "decode_static": (lambda _: gpu_parts.decode_torch("static"), 150),
    "gpt2": (lambda _: gpu_parts.gpt2(), 150),
    "llama_2048": (lambda _: gpu_parts.llama("llama_2048"), 90),
    "llama_8192": (lambda _: gpu_parts.llama("llama_8192"), 90),
    "shakespeare": (shakespeare, 150),
}
"""function of each part, and its largest number of seconds"""
LOADS_JAX = ("bounds", "attention", "decode", "llama_2048", "llama_8192")
LOADS_TORCH = ("attention_torch", "decode_dynamic", "decode_static")
NO_GPU = 3
"""exit status of a part that finds no GPU"""


def check_gpu(part: str) -> None:
    """Check that the framework of a part computes on a GPU.

    Raises:
        SystemExit: it does not; the status is `NO_GPU`.
    """
    if part in LOADS_JAX:
        import jax

        found, remedy = jax.default_backend(), "Run: make setup ACCELERATOR=gpu"
    elif part in LOADS_TORCH:
        import torch

        found, remedy = "gpu" if torch.cuda.is_available() else "cpu", "Install PyTorch for CUDA."
    else:  # its processes need the memory of the GPU, which JAX would reserve here
        return
    if found != "gpu":
        print(f"error: this benchmark needs a GPU, but the part {part} would use {found}. {remedy}", file=sys.stderr)
        raise SystemExit(NO_GPU)


def run_part(part: str, words: Sequence[str], target: Path) -> None:
    """Run a part in this process, and write its rows and the machine to `target` after each measurement."""
    check_gpu(part)
    where, rows = "", []
    if part in LOADS_JAX:
        from benchmarks.machine import machine

        where = machine()
    for row in PARTS[part][0](words):
        rows.append(row)
        replacement = target.with_suffix(".new")
        replacement.write_text(json.dumps({"rows": rows, "machine": where}))
        replacement.replace(target)  # the parent may read at any time


def end_group(process: subprocess.Popen) -> None:
    """End a process and all processes that it started and that are in its group: SIGTERM, after `GRACE` s SIGKILL."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:  # no process of the group is left
            break
        limit = time.monotonic() + GRACE
        while time.monotonic() < limit and _exists(process):
            time.sleep(0.05)
    process.wait()


def _exists(process: subprocess.Popen) -> bool:
    process.poll()  # collects the process, which would otherwise stay in its group
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def run_group(
    command: Sequence[str], seconds: float, poll: Callable[[], Any], environment: dict[str, str]
) -> tuple[int | None, float]:
    """Run a command in its own process group, and end the whole group afterwards, also after Ctrl-C.

    Args:
        command: the program and its arguments.
        seconds: time after which the group is ended.
        poll: called twice a second while the command runs, and at its end.
        environment: variables of the command, in addition to those of this process.

    Returns:
        The exit status of the command (None if it was ended after `seconds`), and its seconds.
    """
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, start_new_session=True)
    try:
        while (status := process.poll()) is None and time.monotonic() - start < seconds:
            time.sleep(0.5 if time.monotonic() - start > 1 else 0.05)
            poll()
    finally:
        end_group(process)
        poll()
    return status, time.monotonic() - start


def table(rows: Sequence[Row]) -> str:
    """Return all rows as a table in Markdown.

    The bound of a row with `flops` is the rate of matrix multiplications, and of a row with `bytes` the rate of copies.
    """
    rates = {row["work"]: row["rate"] for row in rows if row["side"] == "bound"}
    mine = {row["work"]: row["seconds"] for row in rows if row["side"] == "ours"}
    lines = ["| work | side | ms | rate | of the bound | first, s | ours is faster by |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        share = share_of_bound(row, rates)
        ratio = row["seconds"] / mine[row["work"]] if row["side"] != "ours" and row["work"] in mine else float("nan")
        cells = [
            row["work"],
            row["side"],
            _number(1e3 * row["seconds"], "{:,.3f}"),
            f"{row['rate']:.4g} {row['unit']}",
            _number(100 * share, "{:.1f} %"),
            _number(row["first"], "{:.1f}"),
            _number(ratio, "{:.2f} x"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def share_of_bound(row: Row, rates: dict[str, float]) -> float:
    """Return the share of the measured rate of the GPU that a row reaches; NaN if either is unknown."""
    for field, bound in {"flops": "matrix multiplication", "bytes": "copy"}.items():
        if field in row and bound in rates:
            return row[field] / row["seconds"] / rates[bound]
    return float("nan")


def _number(value: float, form: str) -> str:
    return "" if value != value else form.format(value)


def summary(rows: Sequence[Row], failures: dict[str, str], where: str) -> str:
    """Return the last line: the training step of GPT-2 if it was measured, otherwise the first row."""
    by_side = {(row["work"], row["side"]): row for row in rows}
    first = by_side.get(("training step, gpt2", "ours"), rows[0])
    peers = [row for row in rows if row["work"] == first["work"] and row is not first] or [first]
    ratio = first["rate"] / peers[0]["rate"]
    facts = {"all": list(rows), "failed": failures, "versions": versions("jax", "flax", "torch", "transformers")}
    return last_line(first["work"], peers[0]["rate"], first["rate"], ratio, first["unit"], where, **facts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, as they come")
    parser.add_argument("--seconds", type=float, default=420.0, help="time of all parts; later parts are left out")
    parser.add_argument("--part-seconds", type=float, help="time of each part, instead of its own limit")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "WORK"), help="internal: run one side as a worker")
    parser.add_argument("--run-part", nargs=2, metavar=("PART", "FILE"), help="internal: run one part in this process")
    options, words = parser.parse_known_args()
    if unknown := [word for word in words if word.startswith("--") and not word.startswith("--data.")]:
        parser.error(f"unknown option {unknown[0]}. Options of the recipe of the part shakespeare start with --data.")
    if options.worker:
        side, work = options.worker
        serve(gpu_parts.SIDES[side](work))
        return 0
    if options.run_part:
        part, target = options.run_part
        run_part(part, words, Path(target))
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the running part, too
    start, found, failures = time.monotonic(), {}, {}
    where = "unknown machine"

    def write() -> None:
        if options.json is not None:
            rows = [row for part in found.values() for row in part]
            text = json.dumps({"machine": where, "rows": rows, "failed": failures}, indent=1)
            options.json.write_text(text + "\n")

    for part in options.parts:
        limit = min(options.part_seconds or PARTS[part][1], options.seconds - (time.monotonic() - start))
        if limit < 5:
            failures[part] = f"not started within --seconds {options.seconds:g}"
            print(f"{part}: {failures[part]}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "rows.json"

            def poll(part=part, target=target) -> None:
                nonlocal where
                if target.exists():
                    answer = json.loads(target.read_text())
                    where, found[part] = answer["machine"] or where, answer["rows"]
                    write()

            command = [sys.executable, "-m", MODULE, "--run-part", part, str(target), *words]
            status, seconds = run_group(command, limit, poll, uncached(folder))
        failure = {None: f"not finished after {limit:.0f} s", 0: ""}.get(
            status, f"status {status}; see its output above"
        )
        if failure:
            failures[part] = failure
        print(f"{part}: {failures.get(part, 'done')}, {seconds:.0f} s", flush=True)
        write()
        if status == NO_GPU:
            return 1
    rows = [row for part in found.values() for row in part]
    if not rows:
        print("error: no part has a result; see the output above.", file=sys.stderr)
        return 1
    print(f"\n{where}\n\n{table(rows)}\n\n{summary(rows, failures, where)}", flush=True)
    return 1 if failures else 0


def uncached(folder: str) -> dict[str, str]:
    """Return variables with which no side reads programs that an earlier run compiled."""
    return {
        # By default each process reserves most of the memory of the GPU, and two take turns.
        "XLA_PYTHON_CLIENT_PREALLOCATE": os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
    }


if __name__ == "__main__":
    sys.exit(main())
