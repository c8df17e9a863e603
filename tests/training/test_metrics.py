"""Metrics files, TensorBoard, the metrics lines of the journal, and the progress display."""

import dataclasses
import io
import json
import math
import os
import pty
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from training_recipes import tiny_recipe

from transformer.training.metrics._writer import MetricsWriter, Progress, read_metrics
from transformer.training.workdir._journal import Journal, TrainStats
from transformer.viz._records import read_metrics as read_metrics_of_viz


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


def train(workdir, steps, restored_step=None):
    with MetricsWriter(workdir, restored_step=restored_step) as writer:
        for step in steps:
            writer.write(step, {"train/loss": np.float32(1 / step), "train/learning_rate": 0.1})
            if step % 4 == 0:
                writer.write(step, {"eval/loss": 2 / step})


def test_metrics_are_one_json_object_per_line(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            10, {"train/loss": jnp.float32(0.1), "perf/tokens_per_s": np.float64(1e5 / 3), "count": np.int64(3)}
        )
        assert lines(tmp_path) == [  # written immediately, not at the end
            '{"step": 10, "train/loss": 0.1, "perf/tokens_per_s": 33333.333333333336, "count": 3}'
        ]
        writer.write(20, {"train/loss": jnp.bfloat16(0.5), "flag": np.bool_(True)})
        writer.flush()
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == {"step": 20, "train/loss": 0.5, "flag": 1}
    assert read_metrics is read_metrics_of_viz


def test_float32_survives(tmp_path):
    values = np.random.default_rng(0).normal(size=50).astype(np.float32)
    with MetricsWriter(tmp_path) as writer:
        for step, value in enumerate(values):
            writer.write(step, {"x": value})
    back = [record["x"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert np.array_equal(np.array(back, np.float32), values)


def test_non_finite_values_are_written_as_strings(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"nan": math.nan, "up": jnp.inf, "down": np.float32(-np.inf)})

    def refuse(constant):
        raise AssertionError(constant)

    (line,) = lines(tmp_path)
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "nan": "NaN", "up": "Infinity", "down": "-Infinity"}
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record["nan"])
    assert (record["up"], record["down"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(("name", "value"), [("x", np.ones(2)), ("x", "1"), ("x", None), ("step", 1), ("x", 1j)])
def test_accepts_only_numbers(tmp_path, name, value):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match=f"'{name}'"):
        writer.write(1, {name: value})


@pytest.mark.parametrize("stopped_at", [4, 6, 9])
@pytest.mark.parametrize("torn", ["", '{"step": 9, "train/lo', '{"step": 9', "\x00\x00"])
def test_a_resumed_run_writes_the_metrics_of_an_uninterrupted_run(tmp_path, stopped_at, torn):
    train(tmp_path / "whole", range(1, 13))
    train(tmp_path / "resumed", range(1, 10))  # killed at step 9, possibly in the middle of a line
    with open(tmp_path / "resumed" / "metrics.jsonl", "a") as file:
        file.write(torn)
    train(tmp_path / "resumed", range(stopped_at + 1, 13), restored_step=stopped_at)
    assert lines(tmp_path / "resumed") == lines(tmp_path / "whole")


def test_without_a_checkpoint_the_file_is_restarted(tmp_path):
    train(tmp_path, range(1, 4))
    train(tmp_path, range(1, 3))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_an_incomplete_last_line_is_skipped_and_other_invalid_lines_are_errors(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 2}\n{"step": 2, "x"')
    assert read_metrics(path) == [{"step": 1, "x": 2}]
    for bad in ("oops", "[1]", '{"x": 1}', '{"step": 2, "x": NaN}'):
        path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl.*2.*JSON.*'step'"):
            read_metrics(path)
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "none")


@pytest.mark.parametrize(("writer", "place"), [("_file", r"metrics\.jsonl"), ("_board", r"tensorboard/events\.out")])
def test_a_full_disk_names_file_and_remedy(tmp_path, writer, place):
    metrics = MetricsWriter(tmp_path, tensorboard=True)
    appended = metrics._file if writer == "_file" else metrics._board._file
    appended.close()
    appended._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=rf"space.*{place}"):
        metrics.write(1, {"x": 1.0})
    metrics.close()


CLOCK_BACK = """
import sys, time
from transformer.training.metrics._writer import MetricsWriter
with MetricsWriter(sys.argv[1], tensorboard=True) as writer:
    writer.write(1, {"x": 1.0})
    now = time.time
    time.time = lambda: now() - 365 * 86400
    for step in range(2, 40):
        writer.write(step, {"x": 1.0})
    writer.flush()
"""


@pytest.mark.cpu_only("starts processes that compute on the CPU")
def test_a_clock_set_back_by_a_year_does_not_block_logging(tmp_path):
    """tensorboardX's own writer waits by wall time in a thread: it fails, and the program never ends."""
    command = [sys.executable, "-c", CLOCK_BACK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert [step for step, _, _ in events(tmp_path)[0]] == list(range(1, 40))


def events(workdir):
    """(step, tag, value) of every scalar in the TensorBoard files, and the steps from which older events are purged."""
    scalars, purged = [], []
    for path in sorted((workdir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            if event.HasField("session_log"):
                purged.append(event.step)
    return scalars, purged


def test_writes_tensorboard_events(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(5, {"train/loss": 0.5, "eval/loss": 0.75})
    assert events(tmp_path) == ([(5, "train/loss", 0.5), (5, "eval/loss", 0.75)], [])
    with MetricsWriter(tmp_path, restored_step=5, tensorboard=True) as writer:
        writer.write(6, {"train/loss": 0.25})
    assert events(tmp_path)[1] == [6]


def test_tensorboard_is_off_by_default(tmp_path):
    MetricsWriter(tmp_path).close()
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


class Pending:
    """A metric that may still be in computation on the device."""

    def __init__(self, value, ready):
        self.value, self.is_ready = value, lambda: ready


@pytest.mark.parametrize("ready", [True, False])
def test_reports_the_time_a_step_waits_for_data(tmp_path, monkeypatch, ready):
    """A batch that is loaded while the device is still busy causes no waiting time."""
    now = [0.0]
    monkeypatch.setattr("transformer.training.workdir._journal.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(jax, "device_get", lambda tree: {n: np.asarray(m.value) for n, m in tree.items()})
    recipe = tiny_recipe(steps=5)
    recipe = dataclasses.replace(recipe, logging=dataclasses.replace(recipe.logging, every=2))
    scalars = {"loss_sum": 1.0, "weight": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": 0, "finite": True}
    with MetricsWriter(tmp_path) as writer:
        journal = Journal(recipe, TrainStats(), writer, Progress(5, mode="none"), [])
        for step in range(1, 6):
            journal.fed(0.25)
            journal.add(step, {name: Pending(value, ready) for name, value in scalars.items()})
            now[0] += 1.0
        journal.read()
    waits = [line["perf/data_wait"] for line in read_metrics(tmp_path / "metrics.jsonl") if "perf/data_wait" in line]
    assert max(waits) == pytest.approx(0.25 if ready else 0.0)


@pytest.mark.parametrize("routed", [True, False])
def test_router_loss_is_printed_for_models_with_routers(tmp_path, routed):
    """It is a mean over the targets since the last line, like the loss."""
    with MetricsWriter(tmp_path) as writer:
        recipe = tiny_recipe(steps=4)
        recipe = dataclasses.replace(recipe, logging=dataclasses.replace(recipe.logging, every=2))
        journal = Journal(recipe, TrainStats(), writer, Progress(4, mode="none"), [])
        for step in range(1, 5):
            sums = {"loss_sum": 6.0 * step, "weight": 2.0 * step} | ({"router_loss": 1.0 * step**2} if routed else {})
            scalars = {"grad_norm": 1.0, "learning_rate": 0.1, "skipped": 0, "finite": True}
            journal.add(step, {name: np.asarray(value) for name, value in (sums | scalars).items()})
        journal.read()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["train/loss"] for line in lines] == [3.0, 3.0]
    found = [line.get("train/router_loss") for line in lines]
    assert found == (pytest.approx([5 / 6, 25 / 14]) if routed else [None, None])


def test_a_pipe_receives_plain_lines(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich would use colors because of it
    clock = iter(range(100))
    monkeypatch.setattr("transformer.training.metrics._writer.time.monotonic", lambda: 100.0 + 30 * next(clock))
    stream = io.StringIO()
    with Progress(1000, start_step=100, stream=stream) as progress:
        progress.update(110, loss=2.34567, targets_per_s=12345.6)
        progress.advance(115)
        progress.update(120, loss=float("nan"))
        progress.print("[bold]a sample[/bold]")
        progress.update(1000, loss=0.5)
    assert stream.getvalue().splitlines() == [
        "step 110/1000  loss 2.3457  12,346 tokens/s",
        "step 120/1000  loss nan  0:44:00 left",
        "[bold]a sample[/bold]",
        "step 1000/1000  loss 0.5000",
    ]


def test_progress_none_prints_only_text():
    stream = io.StringIO()
    with Progress(10, mode="none", stream=stream) as progress:
        progress.update(5, loss=1.0)
        progress.print("text")
    assert stream.getvalue() == "text\n"
    with pytest.raises(ValueError, match=r"'auto'.*'bar'.*'lines'.*'none'.*got 'fancy'"):
        Progress(10, mode="fancy")


SHOW = """
from transformer.training.metrics._writer import Progress
with Progress(200, targets="images") as progress:
    progress.update(50, loss=2.5, targets_per_s=1234.0)
    progress.print("a sample [1]")
    progress.update(200, loss=1.25, targets_per_s=1234.0)
"""


@pytest.mark.cpu_only("starts processes that compute on the CPU")
def test_a_progress_bar_appears_only_on_a_terminal():
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHOW]
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 10_000)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert process.wait() == 0
    text = shown.decode()
    assert "\x1b[" in text  # moves the cursor
    for piece in ("200/200", "loss 1.2500", "1,234 images/s", "a sample [1]"):
        assert piece in text
    piped = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert b"\x1b" not in piped.stdout + piped.stderr
    assert b"\r" not in piped.stdout
    assert b"step 50/200  loss 2.5000  1,234 images/s\n" in piped.stdout
