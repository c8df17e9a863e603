"""Tests of `make flaky`: which tests it runs."""

import signal
import subprocess

import pytest

from reliability import flaky


@pytest.fixture
def checkout(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("a", "b", "c"):
        write(f"tests/test_{name}.py", "import parts\n" if name == "b" else "")
    write("tests/parts.py", "")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path, write, git


def test_changed_tests_and_users_of_changed_helpers_run(checkout):
    folder, write, git = checkout
    assert flaky.changed_tests("HEAD", folder) == []
    write("tests/test_a.py", "x = 1\n")
    assert flaky.changed_tests("HEAD", folder) == ["tests/test_a.py"]
    write("tests/parts.py", "x = 1\n")
    write("tests/data.json", "{}")
    git("rm", "-q", "tests/test_c.py")
    git("add", ".")
    git("commit", "-q", "-m", "second")
    assert flaky.changed_tests("HEAD~1", folder) == ["tests/test_a.py", "tests/test_b.py"]


def test_the_slowest_tests_run_first():
    assert flaky.slowest_tests({"a": 1.0, "b": 3.0, "c": 2.0}, 2) == ["b", "c"]


def test_a_failed_run_is_the_exit_status(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(flaky, "DURATIONS", tmp_path / "durations")
    flaky.DURATIONS.write_text('{"tests/test_a.py::test_x": 2.0, "tests/test_b.py::test_y": 1.0}')
    monkeypatch.setattr(flaky, "changed_tests", lambda revision: ["tests/test_a.py"])
    calls = []

    def run(words, **options):
        calls.append(words)
        return subprocess.CompletedProcess(words, returncode=len(calls) == 2)

    started, start = [], subprocess.Popen

    def popen(words):
        started.append(start(words))
        return started[-1]

    monkeypatch.setattr(flaky.subprocess, "run", run)
    monkeypatch.setattr(flaky.subprocess, "Popen", popen)
    assert flaky.main(["--times", "3", "--seed", "7"]) == 1
    assert [process.poll() for process in started] == [-signal.SIGKILL]  # the busy process does not outlive it
    assert "1 of 3" in capsys.readouterr().out
    assert [words[words.index("--shuffle") + 1] for words in calls] == ["7", "8", "9"]
    assert all(words[-2:] == ["tests/test_a.py", "tests/test_b.py::test_y"] for words in calls)


def test_requires_durations_of_an_earlier_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(flaky, "DURATIONS", tmp_path / "none")
    with pytest.raises(SystemExit):
        flaky.main([])
    assert "--slowest 0" in capsys.readouterr().err
