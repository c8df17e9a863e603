"""Tests of the limits for long runs, with simulated samples, and a slow test with a short run."""

import ctypes
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from reliability import soak
from reliability.invocations import OPTIONS
from reliability.monitored import Lines
from reliability.page import put, soak_table
from reliability.steady import BLOCKS, MB, Sample, memory_measures, slope, training_measures

ROOT = Path(__file__).resolve().parents[2]


def samples(**changes):
    """Return samples of two steady hours, every 10 seconds; each change is a function of (hours, value)."""
    random, made = np.random.default_rng(0), []
    for seconds in range(10, 7201, 10):
        hours = seconds / 3600
        sample = Sample(
            seconds=seconds,
            in_use=math.nan if seconds % 110 == 0 else 200 * MB + random.normal(0, MB),
            resident=int(600 * MB + 100 * MB * random.random()),
            files=9 + int(random.integers(0, 8)),
            threads=90 + int(random.integers(0, 8)),
            programs=5,
            step=seconds * 10,
            speed=math.nan if seconds % 70 == 0 else 3000 * random.normal(1, 0.05),
            cpu=seconds * 1.5,
        )
        made.append(
            dataclasses.replace(sample, **{name: f(hours, getattr(sample, name)) for name, f in changes.items()})
        )
    return made


def measures(samples, late=()):
    return [*memory_measures(samples, late), *training_measures(samples)]


CPU_SPEED = "steps per processor second, evaluations and checkpoints included"


def failed(**changes):
    return [measure.what for measure in measures(samples(**changes)) if measure.failed]


# Slopes


def test_the_slope_of_a_line_is_exact():
    times = np.arange(BLOCKS * 5.0)
    assert slope(times, 7 - 3 * times) == pytest.approx((-3, -3, -3))


def test_an_outlier_segment_changes_the_slope_little():
    times = np.linspace(0, 2, 900)
    values = 4 * times + np.random.default_rng(0).normal(0, 1, 900)
    values[:50] += 1000
    middle, low, high = slope(times, values)
    assert low < middle < high
    assert middle == pytest.approx(4, abs=0.3)
    assert np.polyfit(times, values, 1)[0] < -100, "a least-squares fit is affected"


def test_confidence_bounds_have_their_nominal_coverage():
    random, times, held = np.random.default_rng(0), np.arange(float(BLOCKS)), 0
    for _ in range(200):
        _, low, high = slope(times, times + random.normal(0, 3, BLOCKS))
        held += low <= 1 <= high
    assert 180 <= held <= 199


def test_rejects_a_slope_without_data():
    with pytest.raises(ValueError, match="3 blocks of time with samples, got 2"):
        slope([0.0, 1.0], [0.0, 1.0])
    with pytest.raises(ValueError, match="3 blocks of time with samples, got 0"):
        slope([], [])
    with pytest.raises(ValueError, match="3 samples in a quarter of the time, got 5 in total"):
        measures(samples()[:5])


# What is too much


def test_a_constant_run_passes():
    rows = measures(samples())
    assert not any(row.failed for row in rows)
    assert rows[0].before.startswith("200.")
    assert (rows[2].before, rows[2].after, rows[3].before) == ("9", "9", "90")
    assert (rows[-1].before, rows[-1].told) == ("6.7", "+0.0 %")


def test_the_first_quarter_is_the_warm_up():
    assert (
        failed(
            in_use=lambda hours, value: value * min(hours / 0.5, 1),
            resident=lambda hours, value: value if hours < 0.5 else value // 2,
            files=lambda hours, value: value - 5 * (hours < 0.5),
            speed=lambda hours, value: value * (1 if hours > 0.5 else 0.2),
        )
        == []
    )


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("memory in use", {"in_use": lambda hours, value: value + 1.5 * MB * hours}),
        ("resident memory, maximum", {"resident": lambda hours, value: value + int(50 * MB * hours)}),
        ("open files, minimum", {"files": lambda hours, value: value + int(hours)}),
        ("threads, minimum", {"threads": lambda hours, value: value + int(hours)}),
        (CPU_SPEED, {"cpu": lambda hours, value: value * (1 + 0.08 * hours)}),
        (CPU_SPEED, {"step": lambda hours, value: int(value * (1 - 0.08 * hours))}),
        (CPU_SPEED, {"step": lambda hours, value: int(value * (1 + 0.08 * hours))}),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_growing_memory_or_falling_speed_fails(what, change):
    assert failed(**change) == [what]


def test_a_machine_slowed_by_other_programs_gives_no_verdict():
    slower = {"speed": lambda hours, value: value * (1 - 0.4 * hours), "seconds": lambda hours, value: value * 2**hours}
    assert failed(**slower) == []


def test_programs_compiled_late_are_named():
    row = next(row for row in measures(samples(), ["step", "step", "decode"]) if row.failed)
    assert (row.what, row.told) == ("programs compiled", "step x 2, decode x 1")


def test_falling_memory_passes():
    assert (
        failed(
            in_use=lambda hours, value: value - 5 * MB * hours,
            resident=lambda hours, value: value - int(50 * MB * hours),
            files=lambda hours, value: value - int(hours),
            threads=lambda hours, value: value - int(hours),
        )
        == []
    )


# Looking


LINUX = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs Linux with glibc 2.33 or later")


@LINUX
def test_a_process_is_measured_from_outside(tmp_path):
    metrics, inside = tmp_path / "metrics.jsonl", tmp_path / "told.jsonl"
    watch = soak.Watch(os.getpid(), time.monotonic() - 5, tmp_path, inside)
    first = watch.look()
    assert 5 <= first.seconds < 60
    assert (first.programs, first.step) == (0, 0)
    assert math.isnan(first.speed)
    assert math.isnan(first.in_use)

    held = np.ones(10_000_000)  # 80 MB
    write(inside, {"at": 1.0, "compiled": "jit(step)"}, {"at": 2.0, "in_use": 9e6}, {"at": 3.0, "in_use": 5e6})
    speeds = (
        {"step": 10, "perf/tokens_per_s": 1.0},
        {"step": 20, "perf/tokens_per_s": 3.0},
        {"step": 20, "eval/loss": 1},
    )
    write(metrics, *speeds)
    with open(metrics, "a") as half:
        half.write('{"step": 30, "perf/tok')
        half.flush()
        second = watch.look()
    assert 60 * MB < second.resident - first.resident < 100 * MB
    assert second.files >= first.files + 1
    assert (second.programs, second.step, second.speed, second.in_use) == (1, 20, 2.0, 5e6)
    assert watch.programs == [(1.0, "jit(step)")]
    metrics.write_text(metrics.read_text() + 'ens_per_s": 7.0}\n')
    third = watch.look()
    assert (third.programs, third.step, third.speed) == (1, 30, 7.0), "an incomplete line is read when it is complete"
    assert held.all()


def write(path, *objects):
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


PROGRAM = """
import jax, sys, time
doubled = jax.jit(lambda x: 2 * x)
doubled(1.0), doubled(2.0)
assert sys.argv[1:] == ["a word"]
time.sleep(3.0)
held = [[str(number)] for number in range(500_000)]
time.sleep(3.0)
"""


@pytest.mark.slow
@LINUX
def test_a_program_reports_compilations_and_live_objects(tmp_path):
    program, inside = tmp_path / "program.py", tmp_path / "told.jsonl"
    program.write_text(PROGRAM)
    words = [sys.executable, "-m", "reliability.monitored", str(inside), str(program), "a word"]
    subprocess.run(words, cwd=ROOT, check=True, env=os.environ | soak.VARIABLES | {"JAX_PLATFORMS": "cpu"})
    lines = Lines(inside).new()
    (compiled,) = (line for line in lines if "compiled" in line)
    assert 0 < time.monotonic() - compiled["at"] < 60
    assert "lambda" in compiled["compiled"]
    in_use = [line["in_use"] for line in lines if line.get("in_use") and line["at"] > compiled["at"]]
    assert 50 * MB < in_use[-1] - in_use[0] < 150 * MB, "includes Python objects"


# Results


def results(**changes):
    seen = samples(**changes)
    return soak.record(soak.Soaked(seen, [], [], 72_000, 1440, 3), measures(seen), 2.0, "an abacus")


def test_results_are_stored_subsampled_and_plotted(tmp_path):
    result = json.loads(json.dumps(results(), allow_nan=False))
    assert {len(column) for column in result["series"].values()} == {240}
    assert None in result["series"]["tokens_per_s"]
    soak.draw(result, tmp_path / "soak.png")
    assert 5_000 < (tmp_path / "soak.png").stat().st_size < 100_000


def test_the_table_reports_measured_values_and_limits():
    text = soak_table(results(files=lambda hours, value: value + int(hours)))
    assert "an abacus" in text
    assert "`make soak HOURS=2`, 72,000 steps, 1,440 evaluations and 3 loss spikes" in text
    assert "| open files, minimum | 9 | 10 | **too much** | no increase |" in text
    assert "| programs compiled | 5 | 5 |  | no increase |" in text
    page = put("head\n<!-- soak -->\nold\n<!-- end of soak -->\ntail\n", "soak", text)
    assert page == f"head\n<!-- soak -->\n{text}<!-- end of soak -->\ntail\n"


@pytest.mark.parametrize(
    ("faults", "slower", "code"),
    [([], 0.0, 0), (["exit codes [1]"], 0.0, 1), ([], 0.08, 1), (["printed: no"], 0.08, 1)],
)
def test_measurements_are_stored_for_every_verdict(tmp_path, monkeypatch, capsys, faults, slower, code):
    """The results of two hours are stored even if a check failed."""
    seen = samples(cpu=lambda hours, value: value * (1 + slower * hours))
    monkeypatch.setattr(soak, "soak", lambda folder, hours: soak.Soaked(seen, [], faults, 72_000, 1440, 3))
    page = tmp_path / soak.PAGE
    page.write_text("<!-- soak -->\n<!-- end of soak -->\n")
    (tmp_path / "images").mkdir()
    assert soak.main(["--output", str(tmp_path / "soak.json"), "--folder", str(tmp_path)]) == code
    kept = json.loads((tmp_path / "soak.json").read_text())
    assert kept["faults"] == faults
    assert [measure["failed"] for measure in kept["measures"]].count(True) == bool(slower)
    assert page.read_text() == f"<!-- soak -->\n{soak_table(kept)}<!-- end of soak -->\n"
    assert page.read_text().count("**A fault**") == len(faults)
    assert (tmp_path / "images" / "soak.png").exists()
    printed = capsys.readouterr()
    assert "tokens/s while training" in printed.out
    assert all(fault in printed.out for fault in faults)
    assert ("failed: " in printed.err) == bool(code)


@pytest.mark.parametrize("looks", [0, 2])
def test_reports_a_run_too_short_for_a_verdict(tmp_path, monkeypatch, capsys, looks):
    seen = samples()[:looks]
    monkeypatch.setattr(soak, "soak", lambda folder, hours: soak.Soaked(seen, [], ["exit codes [1]"], 0, 0, 0))
    assert soak.main(["--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "exit codes [1]" in printed.out
    assert f"3 samples in a quarter of the time, got {looks} in total" in printed.err


def test_the_page_equals_the_output_of_the_command():
    kept = ROOT / "docs" / "soak.json"
    text = (ROOT / "docs" / soak.PAGE).read_text(encoding="utf-8")
    assert "<!-- soak -->" in text
    if not kept.exists():
        pytest.skip("no results are kept yet: make soak ARGS='--output docs/soak.json'")
    result = json.loads(kept.read_text(encoding="utf-8"))
    assert put(text, "soak", soak_table(result)) == text, "run: make soak ARGS='--output docs/soak.json'"
    assert not result["faults"]
    assert not any(measure["failed"] for measure in result["measures"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hours 0.01", "--hours must be at least 0.1 (a quarter of it is the warm-up), got 0.01"),
        ("--hours nan", "--hours must be at least 0.1"),
        (
            "--output docs/soak.txt",
            "--output must be a .json file in the directory of reliability.md, got docs/soak.txt",
        ),
        ("--output nowhere/soak.json", "--output must be a .json file in the directory of reliability.md"),
    ],
)
def test_rejects_invalid_options(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        soak.main(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_is_monitored_and_stopped(tmp_path):
    words = [*OPTIONS, "--training.steps", "1000000", "--training.spike-deviations", "1"]
    words += ["--optimizer.learning-rate", "1e-9"]  # the loss rises as often as it falls
    soaked = soak.soak(tmp_path, 600 / 3600, every=1.0, options=words, enough=lambda sample: sample.step > 100)
    assert soaked.faults == []
    assert soaked.steps > 100
    assert soaked.evaluations >= 1
    assert soaked.spikes >= 1, "counted, but not a fault"
    assert soaked.samples[-1].programs >= 3
    assert not math.isnan(np.nanmean([sample.speed for sample in soaked.samples]))
