"""The GPU benchmark on a machine without a GPU: both sides with small sizes, the FLOP count, and ends of its parts."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import gpu, gpu_parts
from transformer import CausalLM
from transformer.nn.models import count_parameters
from transformer.zoo import abstract_params

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small(monkeypatch):
    for name in ("GPT2", "LLAMA"):
        sizes = getattr(gpu_parts, name) | {"vocab_size": 64, "d_model": 32, "num_layers": 2, "num_heads": 4}
        smaller = {"attention.num_kv_heads": 2, "feed_forward.d_ff": 48} if name == "LLAMA" else {}
        monkeypatch.setattr(gpu_parts, name, sizes | smaller)
    monkeypatch.setattr(gpu_parts, "WORKS", dict.fromkeys(gpu_parts.WORKS, (2, 16)))
    for name, value in {"NEW": 4, "PROMPT": 5, "PRODUCT": 16, "COPIED": 16, "QUEUED": 2}.items():
        monkeypatch.setattr(gpu_parts, name, value)
    monkeypatch.setattr(gpu_parts, "ATTENTION", (2, 8, 3, 4))


@pytest.mark.parametrize("work", gpu_parts.WORKS)
def test_a_step_trains(small, work):
    step = gpu_parts.ours(work)
    seen = [step() for _ in range(2)]
    losses = [float(metrics["loss_sum"] / metrics["weight"]) for metrics in seen]
    assert losses[1] != losses[0]
    assert losses[0] == pytest.approx(math.log(64), rel=0.05)


def test_a_timed_run_counts_the_queued_runs(monkeypatch):
    now, waits = [0.0], []
    monkeypatch.setattr(gpu_parts.time, "perf_counter", lambda: now[0])

    def work():
        now[0] += 2.0
        return len(waits)

    def wait(result):
        waits.append(result)
        now[0] += 3.0

    assert gpu_parts.timed(work, wait, runs=3, queued=4) == (pytest.approx((4 * 2.0 + 3.0) / 4), 5.0)
    assert len(waits) == 1 + 1 + 3


@pytest.mark.slow
def test_parts_measure_each_work_once(small):
    rows = [*gpu_parts.bounds(), *gpu_parts.attention(), *gpu_parts.decode()]
    assert [row["work"] for row in rows] == [
        "matrix multiplication",
        "copy",
        "attention, causal, forward",
        "attention, causal, forward and backward",
        "attention, packed, forward",
        "attention, packed, forward and backward",
        "decode, 1 rows",
        "decode, 16 rows",
    ]
    assert all(0 < row["seconds"] < row["first"] for row in rows[2:])
    assert rows[0]["rate"] == pytest.approx(2 * 16**3 / rows[0]["seconds"])
    assert rows[-1]["rate"] == pytest.approx(16 * 4 / rows[-1]["seconds"])


def test_a_short_text_is_an_error(small):
    gpu_parts.check_lengths([4, 4])
    with pytest.raises(RuntimeError, match=r"expected 4 new tokens in each row, got \[3, 4\]"):
        gpu_parts.check_lengths([4, 3])


@pytest.mark.parity
@pytest.mark.parametrize("kinds", [("dynamic",), ("static",)])
def test_transformers_decodes_the_counted_number_of_tokens(small, transformers, kinds):
    rows = list(gpu_parts.decode_torch(*kinds))
    assert [row["side"] for row in rows] == [f"transformers, {kinds[0]} cache"] * 2


@pytest.mark.parity
def test_the_peer_has_the_same_number_of_parameters(small, transformers):
    model = gpu_parts.llama_torch()
    ours = count_parameters(abstract_params(CausalLM(gpu_parts.config("decode"))))
    assert sum(parameter.numel() for parameter in model.parameters()) == ours


@pytest.mark.parametrize("work", gpu_parts.WORKS)
def test_flops_count_the_matrices_and_half_of_the_attention_scores(work):
    model, (rows, length) = CausalLM(gpu_parts.config(work)), gpu_parts.WORKS[work]
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(model))
    matrices = sum(
        leaf.size
        for path, leaf in leaves
        if leaf.ndim > 1
        and not any(word in jax.tree_util.keystr(path).lower() for word in ("embed", "position", "norm"))
    )
    tied = model.config.vocab_size * model.config.d_model  # the tied embedding table, used as the head
    scores = 12 * model.config.num_layers * length * model.config.d_model / 2
    assert gpu_parts.flops(work) == rows * length * (6 * (matrices + tied) + scores)


def test_every_parameter_is_read_once_per_token():
    assert count_parameters(abstract_params(CausalLM(gpu_parts.config("decode")))) == gpu_parts.PARAMETERS


# Process groups

FAMILY = """
import signal, subprocess, sys, time
wait = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[1], "w").write(str(child.pid))
{then}
"""


def running(pid):
    """Return whether a process runs; one that has ended may wait for its parent to notice."""
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(("then", "expected"), [("time.sleep(600)", None), ("sys.exit(5)", 5)])
def test_no_process_of_a_part_is_left(tmp_path, monkeypatch, then, expected):
    """Neither after the limit nor if the part fails: a process that ignores SIGTERM gets SIGKILL."""
    monkeypatch.setattr(gpu, "GRACE", 1.0)
    file, polls = tmp_path / "pid", []
    command = [sys.executable, "-c", FAMILY.format(then=then), str(file)]
    limit = 2.0 if expected is None else 60.0
    status, seconds = gpu.run_group(command, limit, lambda: polls.append(file.exists()), {})
    assert status == expected
    assert seconds < 30
    assert polls[-1]
    assert not running(int(file.read_text()))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ctrl_c_ends_the_part(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 1.0)
    file = tmp_path / "pid"

    def poll():
        if file.exists() and running(int(file.read_text() or 0)):
            raise KeyboardInterrupt

    command = [sys.executable, "-c", FAMILY.format(then="time.sleep(600)"), str(file)]
    with pytest.raises(KeyboardInterrupt):
        gpu.run_group(command, 60.0, poll, {})
    assert not running(int(file.read_text()))


@pytest.mark.slow
def test_failed_parts_leave_the_results_of_the_others(tmp_path, monkeypatch, capsys):
    """Here one part fails after its first row, and another one does not finish."""
    row = gpu_parts.row("copy", "bound", 0.5, 1.0, 8.0, "bytes/s")
    program = """
import json, pathlib, sys, time
part, target = sys.argv[1:3]
pathlib.Path(target).write_text(json.dumps({"machine": "a machine", "rows": [ROW]}))
if part == "attention":
    raise SystemExit(1)
if part == "decode":
    time.sleep(600)
"""
    program = program.replace("ROW", json.dumps(row))
    run_group = gpu.run_group

    def run(command, *rest):
        place = command.index("--run-part")
        return run_group([sys.executable, "-c", program, *command[place + 1 :]], *rest)

    monkeypatch.setattr(gpu, "run_group", run)
    file = tmp_path / "found.json"
    words = ["--parts", "bounds", "attention", "decode", "--part-seconds", "6", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    assert gpu.main() == 1
    found = json.loads(file.read_text())
    assert found["failed"] == {"attention": "status 1; see its output above", "decode": "not finished after 6 s"}
    assert (found["machine"], found["rows"]) == ("a machine", [row] * 3)
    printed = capsys.readouterr().out
    assert "bounds: done" in printed
    assert json.loads(printed.splitlines()[-1])["failed"] == found["failed"]


def test_without_a_gpu_nothing_is_measured(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--parts", "bounds", "decode"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: this benchmark needs a GPU, but the part bounds would use cpu" in done.stderr
    assert "decode" not in done.stdout + done.stderr


def test_the_table_compares_with_the_bounds_and_with_ours():
    rows = [
        gpu_parts.row("matrix multiplication", "bound", 1.0, 2.0, 100.0, "FLOP/s"),
        gpu_parts.row("step", "ours", 0.5, 3.0, 4.0, "tokens/s", flops=25.0),
        gpu_parts.row("step", "a peer", 0.75, 3.0, 4.0, "tokens/s", flops=25.0),
        gpu_parts.row("decode", "ours", 0.5, 3.0, 4.0, "tokens/s", bytes=25.0),
    ]
    lines = gpu.table(rows).splitlines()[2:]
    assert lines[1] == "| step | ours | 500.000 | 4 tokens/s | 50.0 % | 3.0 |  |"
    assert lines[2] == "| step | a peer | 750.000 | 4 tokens/s | 33.3 % | 3.0 | 1.50 x |"
    assert lines[3] == "| decode | ours | 500.000 | 4 tokens/s |  | 3.0 |  |"
