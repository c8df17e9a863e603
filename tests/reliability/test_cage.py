"""Tests of the sandbox of the fuzz tests: it detects each forbidden operation."""

import os
import subprocess
import sys
import time
from pathlib import Path

import fuzz_parts
import numpy as np
import pytest
from fuzz_parts import Fuzz, damaged, fuzz, rewritten, written
from hypothesis import strategies as st

from transformer.config._untrusted import parse_json

__all__ = ["fuzz"]  # a fixture

ONE = st.just(None)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside.json"
    path.write_text("{}")
    return path


def test_accepts_allowed_behavior_of_a_reader(fuzz: Fuzz, tmp_path: Path):
    def read(folder: Path, value: None) -> None:
        import difflib  # noqa: F401  Python may open its own files

        assert (folder / "a.json").read_text() == "{}"
        assert [path.name for path in folder.iterdir()] == ["a.json"]
        np.zeros(2**20)

    fuzz("test", 1, ONE, read, put=lambda folder, value: (folder / "a.json").write_text("{}"))


@pytest.mark.parametrize(
    ("offence", "message"),
    [
        (lambda folder, outside: outside.read_text(), "open .*outside.json"),
        (lambda folder, outside: (folder / ".." / "outside.json").read_text(), "open .*outside.json"),
        (lambda folder, outside: (folder / "link").read_text(), "open .*outside.json"),
        (lambda folder, outside: os.open(outside, os.O_RDONLY), "open .*outside.json"),
        (lambda folder, outside: list(outside.parent.iterdir()), "os.listdir|os.scandir"),
        (lambda folder, outside: (folder / "new").write_text(""), "open .*new"),
        (lambda folder, outside: (folder / "link").unlink(), "os.remove"),
        (lambda folder, outside: subprocess.run([sys.executable, "-c", ""]), "subprocess.Popen"),
    ],
)
def test_detects_forbidden_behavior_of_a_reader(fuzz: Fuzz, outside: Path, offence, message):
    def put(folder: Path, value: None) -> None:
        if not (folder / "link").is_symlink():
            (folder / "link").symlink_to(outside)

    with pytest.raises(AssertionError, match=rf"({message})"):
        fuzz("test", 1, ONE, lambda folder, value: offence(folder, outside), put=put)


def raising(error: Exception):
    def read(folder: Path, value: None) -> None:
        raise error

    return read


@pytest.mark.parametrize("error", [TypeError("x"), KeyError("x"), RecursionError("x"), MemoryError(), OSError("x")])
def test_an_error_other_than_a_rejection_fails(fuzz: Fuzz, error):
    with pytest.raises(type(error)):
        fuzz("test", 1, ONE, raising(error))


def test_a_rejection_is_counted_and_checked(fuzz: Fuzz, request):
    fuzz("test", 1, ONE, raising(ValueError("wrong\n\x1b[2J" + "x" * 10**6)))
    ((name, recorded),) = request.node.user_properties
    assert name == "fuzz"
    assert '"read": 0, "refused": 1' in recorded
    request.node.user_properties.clear()


@pytest.mark.skipif(sys.platform != "linux", reason="memory can be limited only on Linux")
def test_memory_is_bounded(fuzz: Fuzz):
    with pytest.raises(MemoryError):
        fuzz("test", 1, ONE, lambda folder, value: np.empty(2 * fuzz_parts.MEMORY, np.uint8))
    assert np.empty(fuzz_parts.MEMORY, np.uint8).size, "not limited afterwards"


def test_time_is_bounded(fuzz: Fuzz, monkeypatch):
    monkeypatch.setattr(fuzz_parts, "SECONDS", 0.01)

    def read(folder: Path, value: None) -> None:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass

    with pytest.raises(AssertionError, match=r"took 0\.\d s"):
        fuzz("test", 1, ONE, read)


@pytest.mark.slow
def test_an_endless_case_ends_the_process():
    """A separate process has a watchdog with a limit of one second."""
    program = (
        "import faulthandler, fuzz_parts, time\nfuzz_parts.HANGS = 1\nfuzz_parts.Watchdog().alive()\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr


def test_edits_change_the_input():
    tree = {"a": [1, {"b": "c"}], "d": 2.5}
    put = rewritten(tree, [(2, "put", None, "")])
    assert tree == {"a": [1, {"b": "c"}], "d": 2.5}, "the original is unchanged"
    assert put == {"a": [None, {"b": "c"}], "d": 2.5}
    assert rewritten(tree, [(1, "drop", None, "")]) == {"d": 2.5}
    assert rewritten(tree, [(1, "rename", None, "x")]) == {"d": 2.5, "x": [1, {"b": "c"}]}
    assert rewritten(tree, [(1, "add", 3, "x")]) == {"a": [1, {"b": "c"}, 3], "d": 2.5}
    assert rewritten(tree, [(5, "near", None, "x")])["d"] != 2.5
    assert written({"a": "@twice", "b": [float("nan"), "\ud800"]}) == b'{"a": {"a":1,"a":2}, "b": [NaN, "\\ud800"]}'
    assert damaged(b"abcdef", [(2, "cut", b"x")]) == b"ab"
    assert damaged(b"abcdef", [(1, "insert", b"xy"), (7, "drop", b"z")]) == b"axybcde"
    assert damaged(b"abcdef", [(0, "swap", b"xy"), (0, "write", b"Q")]) == b"Qdabef"
    assert parse_json(written(tree)) == tree
