"""Tests of reliability/: the parts that need no training, and a slow test with one scenario."""

import json
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from training_recipes import xla_flags

from reliability import crash, harming
from reliability.invocations import RunState, check_resumed, digest, newest, reached, started_since, unfinished
from reliability.pace import QUICK, Limit, pace
from reliability.page import crash_table, put
from reliability.world import AFTER, Tally, Timing, World, draw_moment, phase, timed
from transformer.training.workdir._checkpoint import Checkpointer

ROOT = Path(__file__).resolve().parents[2]
TOLD = """device: 1 x cpu, jax 1.2.3
workdir: here, resuming from step 40, to step 60
compiling the training step ...
compiled in 0.1 s
step 41/60  loss 2.0
step 42/60  loss 2.0
step 42: eval loss 2.0
"""


# Moments


def test_kill_times_are_between_start_and_expected_end():
    timing = Timing(first_step=4.0, end=10.0)
    assert timing.expected_end(0, 60) == 10.0
    assert timing.expected_end(30, 60) == 7.0
    assert timing.corrected(3.5, 30, 60) == Timing(2.0, 5.0)
    rng = random.Random(0)
    moments = [draw_moment(rng, timing, 30, 60) for _ in range(1000)]
    seconds = [moment.seconds for moment in moments]
    assert 0 <= min(seconds) < 0.1
    assert 6.9 < max(seconds) <= 7.0
    assert 0.4 < np.mean([moment.aimed for moment in moments]) < 0.6
    assert max(moment.after for moment in moments) <= AFTER


def test_a_scenario_draws_the_same_with_the_same_seed(tmp_path):
    worlds = [World(tmp_path / str(number), 1, seed, print) for number, seed in enumerate((0, 0, 1))]
    same, again, other = (world.rng("a").random() for world in worlds)
    assert same == again != other
    assert worlds[0].rng("b").random() != same


def test_files_of_an_invocation_show_its_state():
    assert phase("", [], 0, 60) == "at the start"
    assert phase(TOLD.partition("compiled")[0], [], 40, 60) == "in compilation"
    assert phase(TOLD, [], 40, 60) == "in training"
    assert phase(TOLD, [50], 40, 60) == "in a save"
    assert phase(TOLD, [20], 40, 60) == "in a deletion"
    assert phase(TOLD.replace("42/60", "60/60"), [], 60, 60) == "at the end"


# What is read of a call


def test_steps_are_read_from_the_output():
    assert reached(TOLD, 60) == 42
    assert reached("device: 1 x cpu\nstep by step\nstep 7: eval loss 2.0\n", 60) == 0


def test_the_step_at_which_a_run_resumed_is_checked():
    assert check_resumed(TOLD, 40) == []
    assert check_resumed("", 40) == [], "killed before it printed the line"
    assert check_resumed(TOLD, 30) == [
        "expected 'resuming from step 30,', got 'workdir: here, resuming from step 40, to step 60'"
    ]
    assert len(check_resumed(TOLD, 4)) == 1, "a prefix of the number does not match"
    assert len(check_resumed(TOLD, 0)) == 1
    assert check_resumed("workdir: here, a new run, to step 60", 0) == []
    (fault,) = check_resumed(f"warning: Using the checkpoint of step 30, because a newer one is damaged: x\n{TOLD}", 40)
    assert "a newer one is damaged" in fault


def test_distinguishes_a_new_save_from_one_left_over(tmp_path):
    assert (newest(tmp_path), unfinished(tmp_path)) == (0, {})
    folder = tmp_path / "checkpoints"
    for name in ("10", "9", "20.tmp", "notes.tmp"):
        (folder / name).mkdir(parents=True)
    stale = unfinished(tmp_path)
    assert newest(tmp_path) == 10
    assert list(stale) == [20]
    assert started_since(stale, tmp_path) == []
    (folder / "30.tmp").mkdir()
    assert started_since(stale, tmp_path) == [30]
    os.utime(folder / "20.tmp", (1, 1))  # deleted and created again
    assert sorted(started_since(stale, tmp_path)) == [20, 30]


def test_bits_types_and_shapes_are_compared():
    array = np.float32([[1.0, 0.0]])
    others = [np.float32([[1.0, -0.0]]), np.float32([1.0, 0.0]), array.view(np.int32), np.float32([[np.nan, 0.0]])]
    assert digest(array) == digest(array.copy())
    assert len({digest(other) for other in [array, *others]}) == 5


def test_reports_differences_of_two_runs():
    state = RunState(9, {"a": "1", "b": "2"}, {"x": 1}, [{"step": 9}], "text")
    assert state.differences(state) == []
    assert RunState(8, {}, {}, [], "").differences(state) == ["the newest checkpoint is of step 8, expected 9"]
    other = RunState(9, {"a": "1", "b": "3", "c": "4"}, {"x": 2}, [], "text")
    assert other.differences(state) == ["2 of 2 arrays differ, the first is b", "data differ", "metrics differ"]


# Harm


@pytest.fixture
def workdir(tmp_path):
    with Checkpointer(tmp_path, keep_last=3) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"x": np.arange(5.0) + step}, data={"next": step})
    return tmp_path


def test_a_file_is_damaged_as_its_scenario_names(tmp_path):
    path, content, rng = tmp_path / "file", bytes(range(100)), random.Random(0)
    found = {}
    for name, (harm, _) in harming.HARMS.items():
        path.write_bytes(content)
        harm(path, rng)
        found[name] = path.read_bytes() if path.exists() else None
    assert (found["truncated"], found["emptied"], found["deleted"]) == (content[:50], b"", None)
    changed = [a ^ b for a, b in zip(found["a bit flipped"], content, strict=True)]
    assert Counter(bin(bits).count("1") for bits in changed) == {0: 99, 1: 1}


def test_every_damaged_checkpoint_file_must_be_detected(workdir):
    rng = random.Random(0)
    files = harming.files(workdir / "checkpoints" / "20")
    assert "manifest.json" in {path.name for path in files}
    assert len(files) > 4
    for path in files:
        content = path.read_bytes()
        for name, (harm, _) in harming.HARMS.items():
            harm(path, rng)
            assert harming.found(workdir, path, 10) == [], (path, name)
            path.write_bytes(content)
    used, named = harming.found(workdir, files[0], 10)
    assert used == "step 20 was used, expected 10"
    assert named == "not named: []"


# A full disk


def test_a_full_disk_must_be_a_one_line_error_with_its_path(tmp_path):
    good = f"step 1/9\nerror: No checkpoint was written to {tmp_path}/checkpoints/4: the disk is full. Do."
    assert harming.check_full(good, tmp_path) == []
    assert harming.check_full("killed", tmp_path) == ["0 lines report that the disk is full, expected 1"]
    without = harming.check_full("error: No space left on device. Free some.", tmp_path)
    assert without == ["the place is missing: error: No space left on device. Free some."]
    noisy = harming.check_full(f"Traceback (most recent call last):\n{good}\n{good}", tmp_path)
    assert noisy == ["2 lines report that the disk is full, expected 1", "printed: Traceback (most recent call last):"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_process_that_uses_a_disk_is_named(tmp_path):
    (folder := tmp_path / "disk").mkdir()
    assert harming.holders(folder) == []
    with open(folder / "file", "w"):
        (holder,) = harming.holders(folder)
    assert holder.startswith(f"process {os.getpid()} (")
    assert holder.endswith(f"uses {folder / 'file'}")


# Limits


def test_a_limit_grows_with_the_load_of_the_machine(monkeypatch):
    now, slow = [0.0], [4.0]
    monkeypatch.setattr("reliability.pace.pace", lambda clock: slow[0])
    limit = Limit(10.0, lambda: now[0])
    for seconds, passed in ((9.0, False), (39.0, False), (41.0, True)):
        now[0] = seconds
        assert limit.passed() is passed
    slow[0], now[0] = 1.0, 39.0
    assert not limit.passed(), "the limit never falls"


def test_the_pace_uses_wall_clock_time():
    ticks = iter((0.0, 3 * QUICK, 0.0, 0.0, 0.0, 1e9))
    assert [pace(lambda: next(ticks)) for _ in range(3)] == [pytest.approx(3.0), 1.0, 100.0]


# Results


def test_an_error_in_a_scenario_counts_as_its_fault():
    def scenario(world):
        raise TimeoutError("it hangs")

    tally = timed(scenario, None, "broken")
    assert tally.failed
    assert tally.faults == ["the scenario itself: TimeoutError: it hangs"]
    assert Tally("empty", "").failed, "no case was run"
    assert not Tally("there", "", not_run="no root").failed


def results():
    good, bad, missing = Tally("good", "all", seconds=70), Tally("bad", "some"), Tally("none", "x", not_run="no root")
    for number in range(3):
        good.case(str(number), [])
        bad.case(str(number), ["lost"] if number else [])
        good.counts["in a save"] += 1
    good.remarks.append("2 runs")
    return crash.record([good, bad, missing], 3, 0, "an abacus")


def test_the_table_reports_counts_and_faults():
    text = crash_table(json.loads(json.dumps(results())))
    assert "| `good` | all | 3 | 3 | 3 in a save; 2 runs |" in text
    assert "| `bad` | some | 3 | 1 | **2 faults** |" in text
    assert "| `none` | x | not run | | no root |" in text
    assert "an abacus" in text
    assert "1 min: `make crash KILLS=3`, seed 0" in text
    assert "\n```bash\npython train.py " in text, "a shell block, which the documentation tests check"
    assert all(len(line) <= 120 for line in text.splitlines() if "--training.steps" in line)


def test_the_table_is_inserted_between_markers_of_the_page():
    page, made = "head\n<!-- crash -->\nold\n<!-- end of crash -->\ntail\n", crash_table(results())
    once = put(page, "crash", made)
    assert once.startswith("head\n<!-- crash -->\n")
    assert once.endswith("<!-- end of crash -->\ntail\n")
    assert "old" not in once
    assert put(once, "crash", made) == once
    with pytest.raises(ValueError, match="must contain the lines <!-- crash --> and"):
        put("head", "crash", made)


def test_the_page_equals_the_output_of_the_command():
    kept = ROOT / "docs" / "reliability.json"
    if not kept.exists():
        pytest.skip("no results are kept yet: make crash ARGS='--output docs/reliability.json'")
    result = json.loads(kept.read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert put(text, "crash", crash_table(result)) == text, "run: make crash ARGS='--output docs/reliability.json'"
    assert [scenario["name"] for scenario in result["scenarios"]] == list(crash.SCENARIOS)
    assert not any(scenario["failed"] for scenario in result["scenarios"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kills 0", "--kills must be at least 1, got 0"),
        ("--only nothing", "invalid choice: 'nothing'"),
        ("--only strays --output docs/reliability.json", "remove --only"),
        ("--output docs/nowhere.json", "an existing .md file of the same name"),
    ],
)
def test_rejects_invalid_options(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        crash.main(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_killed_runs_lose_nothing(capsys, monkeypatch):
    """Run one of the scenarios of `make crash`; all scenarios take a quarter of an hour or more."""
    monkeypatch.setenv("XLA_FLAGS", xla_flags(1))
    assert crash.main(["--kills", "1", "--only", "one_process"]) == 0
    (scenario,) = json.loads(capsys.readouterr().out.splitlines()[-1])["scenarios"]
    assert scenario["name"] == "one_process"
    assert scenario["times"] == scenario["good"] > 0
