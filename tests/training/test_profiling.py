"""`--profile START:STOP`: the traced steps and the printed messages. A list of calls replaces JAX's profiler."""

import pathlib
from pathlib import Path

import jax
import pytest
from training_recipes import change, text_recipe

import train as entry
from transformer.config import ConfigError
from transformer.training._loop import train
from transformer.training._profile import Profiler, Window, parse_window

pytestmark = pytest.mark.cpu_only("computes nothing on a device")


@pytest.fixture
def calls(monkeypatch):
    """The calls of JAX's profiler."""
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: found.append(("start", Path(folder).name)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append(("stop",)))
    return found


def run(window, steps, done=0, **kwargs):
    """Run from step `done`; return the printed messages, and the steps after which the devices were waited for."""
    said, waited = [], []
    with Profiler(window, "somewhere", step=done, say=said.append, **kwargs) as profiler:
        for step in range(done, steps):
            profiler.at(step, lambda step=step: waited.append(step))
            with profiler.step(step + 1):
                pass
    return said, waited


def test_parses_a_step_window():
    assert parse_window("20:30", 100) == Window(20, 30)
    assert parse_window("0:100", 100) == Window(0, 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20", r"START:STOP.*20:30.*got '20'"),
        ("a:b", "got 'a:b'"),
        ("-1:4", "got '-1:4'"),
        ("30:20", r"START.*STOP"),
        ("20:20", r"START.*STOP"),
        ("20:101", r"STOP.*100.*\(--training.steps\).*--profile 20:30"),
    ],
)
def test_rejects_invalid_windows(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_window(text, 100)


@pytest.mark.parametrize("steps", [1, 2, 5, 29, 1000])
def test_the_suggested_window_is_valid(steps):
    with pytest.raises(ConfigError) as refused:
        parse_window("9:9", steps)
    parse_window(str(refused.value).rpartition("--profile ")[2].rstrip("."), steps)


def test_exactly_the_steps_of_the_window_are_traced(calls):
    said, waited = run(Window(2, 5), steps=8)
    assert calls == [("start", "profile"), ("stop",)]
    assert waited == [2, 5]
    assert len(said) == 1
    assert "trace from step 2 to step 5: somewhere/profile" in said[0]
    assert "xprof --logdir somewhere/profile" in said[0]
    assert "http://localhost:8791" in said[0]


def test_a_run_that_ends_first_ends_the_trace(calls):
    said, waited = run(Window(2, 8), steps=5)
    assert calls == [("start", "profile"), ("stop",)]
    assert "trace from step 2 to the end" in said[0]
    assert waited == [2]


def test_an_error_ends_the_trace(calls):
    def fail():
        with Profiler(Window(0, 8), "x", step=0, say=str) as profiler:
            profiler.at(0, lambda: None)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert calls[-1] == ("stop",)


def test_a_run_resumed_within_the_window_traces_its_rest(calls):
    said, _ = run(Window(2, 6), steps=8, done=4)
    assert "trace from step 4 to step 6" in said[0]


def test_a_run_resumed_after_the_window_reports_no_trace(calls):
    said, _ = run(Window(2, 4), steps=8, done=4)
    assert said == ["no trace: the run resumes from step 4, but --profile ends at step 4"]
    assert calls == []


def test_only_the_first_process_writes_the_trace(calls):
    assert run(Window(2, 4), steps=8, first=False) == ([], [])
    assert run(None, steps=8) == ([], [])
    assert calls == []


def test_the_command_line_option_sets_the_window(tmp_path, monkeypatch):
    """The option is checked before anything is read or written, and passed on."""
    recipe = tmp_path / "mine.py"
    source = f"import sys\nsys.path.insert(0, {str(pathlib.Path(__file__).parents[1])!r})\n"
    source += "from training_recipes import tiny_recipe\ndef get_config():\n    return tiny_recipe(steps=40)\n"
    recipe.write_text(source)
    given = {}

    class Done:
        exit_code = 0

    monkeypatch.setattr("transformer.training._loop.train", lambda *args, **kwargs: given.update(kwargs) or Done)
    words = [str(recipe), "--workdir", str(tmp_path / "run")]
    assert entry.main([*words, "--profile", "10:20"]) == 0
    assert given["profile"] == Window(10, 20)
    assert entry.main(words) == 0
    assert given["profile"] is None
    with pytest.raises(ConfigError, match=r"STOP.*40"):
        entry.main([*words, "--profile", "10:50"])
    with pytest.raises(ConfigError, match="takes steps: 20:30"):
        entry.main([*words, "--profile"])


@pytest.mark.slow
def test_a_real_trace_has_the_steps(tmp_path):
    """XProf's format: one .xplane.pb file for this host, with an event for each step of the window."""
    recipe = change(text_recipe(tmp_path), training={"steps": 6}, evaluation={"every": None})
    train(recipe, tmp_path / "run", profile=Window(2, 5))
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(trace))
    events = [event for plane in data.planes for line in plane.lines for event in line.events if event.name == "train"]
    steps = {value for event in events for name, value in event.stats if name == "step_num"}
    assert steps == {3, 4, 5}
