"""Comparisons of speed: turns, medians, ratios, and workers that communicate over a pipe."""

import json

import pytest

from benchmarks import side_by_side
from benchmarks.side_by_side import Worker, compare, last_line, take_turns, times_faster, versions

WORK = """
import sys, time
from benchmarks.side_by_side import serve
print("a library says hello")
serve(lambda: time.sleep(float(sys.argv[1])), warm_up=1, name=sys.argv[1])
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "some_work.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "some_work"


def test_two_libraries_alternate_and_the_ratio_is_peer_time_over_ours(module):
    found = compare("rest", "slow", (module, "0.01"), (module, "0.2"), environment="untouched", turns=3, times=2)
    assert (found.work, found.peer, found.environment) == ("rest", "slow", "untouched")
    assert found.ours_seconds >= 0.01
    assert found.peer_seconds >= 0.2
    assert found.ratio > 1
    assert found.ours_first >= 0.01


def test_the_order_of_the_libraries_changes_each_round(monkeypatch):
    asked = []

    class Told(Worker):
        def __init__(self, name, environment):
            self.name, self.facts = name, {"first": 1.0}

        def run(self, times):
            asked.append(self.name)
            return [{"ours": 1.0, "peer": 3.0}[self.name]] * times

        def stop(self):
            pass

    monkeypatch.setattr(side_by_side, "Worker", Told)
    found = compare("w", "p", ("ours",), ("peer",), environment="allocator", turns=4, times=1)
    assert found.ratio == 3.0
    assert asked == ["ours", "peer", "peer", "ours"] * 2


def test_tasks_of_one_process_alternate_after_an_uncounted_warm_up():
    done = []
    seconds = take_turns({name: lambda name=name: done.append(name) for name in "abc"}, turns=3)
    assert "".join(done) == "abc" + "abc" + "cba" + "abc"
    assert {name: len(found) for name, found in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert times_faster([4.0, 6.0, 50.0], [2.0, 2.0, 10.0]) == 3.0


def test_a_worker_that_ends_early_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "broken_work.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"broken_work.*3"):
        Worker("broken_work")


def test_the_last_line_is_an_object_with_every_compared_value():
    line = json.loads(last_line("w", 2.0, 3.00049, 1.5, "s", "m", versions=versions("jax", "no-such-package")))
    assert {"work", "peer", "ours", "ratio", "unit", "machine", "versions"} == set(line)
    assert line["ours"] == 3.0
    assert line["versions"]["no-such-package"] == "not installed"
