"""Inputs without an end, and pipes without a writer: one line reports them, and memory is bounded."""

import io
import json
import os
import threading

import pytest
from inference_parts import write_models

from transformer.__main__ import main
from transformer.cli import _streams, _texts
from transformer.cli._streams import open_input
from transformer.config._checks import ConfigError
from transformer.config._untrusted import MOST_LINE_BYTES, bounded_lines

ZERO = "/dev/zero"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def test_reads_every_line_of_a_file():
    content = b"a\nb\r\n\n" + b"x" * 50 + b"\nend"
    assert list(bounded_lines(io.BytesIO(content), "f", 51)) == content.splitlines(keepends=True)
    lines = bounded_lines(io.BytesIO(content), "f", 50)
    assert [next(lines) for _ in range(3)] == [b"a\n", b"b\r\n", b"\n"]
    with pytest.raises(ValueError, match="line 4 of f has more than 50 bytes"):
        next(lines)


class Zeros(io.RawIOBase):
    """A device without an end, which counts what is read."""

    total = 0

    def readable(self):
        return True

    def readinto(self, buffer):
        buffer[:] = bytes(len(buffer))
        self.total += len(buffer)
        return len(buffer)


class Stdin:
    """Stands for `sys.stdin`."""

    def __init__(self, raw):
        self.buffer = io.BufferedReader(raw)

    def isatty(self):
        return False


@pytest.mark.parametrize(
    ("command", "model", "message", "most"),
    [
        ("translate", "translator", "line 1 of stdin has more than", MOST_LINE_BYTES),
        ("chat", "writer", "line 1 of stdin has more than", MOST_LINE_BYTES),
        ("generate", "writer", "stdin has more than", _texts.MOST_STDIN),
        ("embed text", "encoder", "stdin has more than", _texts.MOST_STDIN),
        ("score", "writer", "stdin has more than", _texts.MOST_STDIN),
    ],
)
def test_endless_stdin_is_a_one_line_error(directories, monkeypatch, capsys, command, model, message, most):
    zeros = Zeros()
    monkeypatch.setattr("sys.stdin", Stdin(zeros))
    if command == "chat":
        monkeypatch.setattr("transformer.cli._chat.open_chat", lambda *args, **kwargs: None)
        from transformer.cli._chat import _lines

        with pytest.raises(ValueError, match=message):
            next(_lines())
    else:
        text = ["--text", "-"] if command in ("embed text", "score") else []
        assert main([*command.split(), str(directories[model]), *text]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert message in errors[-1]
        assert sum("error" in line for line in errors) == 1
    assert zeros.total < most + 2**20


@pytest.mark.parametrize("path", [ZERO, "/dev/urandom", "."])
def test_rejects_a_device_as_input_file(directories, capsys, path):
    assert main(["batch", str(directories["writer"]), path]) == 2
    assert f"{path} must be a file or a pipe with requests" in capsys.readouterr().err


def test_rejects_a_device_as_output_file(directories, tmp_path, capsys):
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}))
    assert main(["batch", str(directories["writer"]), str(requests), "--output", ZERO]) == 2
    assert f"line 1 of {ZERO} has more than" in capsys.readouterr().err


def test_a_pipe_is_read_once_it_has_a_writer(tmp_path, monkeypatch):
    """Its writer may start late, write once and exit; until then, a line reports that the command waits."""
    monkeypatch.setattr(_streams, "PATIENCE", 0.05)
    path = tmp_path / "pipe"
    os.mkfifo(path)

    said, waiting = [], threading.Event()
    monkeypatch.setattr(_streams, "print", lambda line, **_: [said.append(line), waiting.set()], raising=False)

    def write():
        assert waiting.wait(20)
        path.write_bytes(b"a\nb\n")

    thread = threading.Thread(target=write)
    thread.start()
    with open_input(path, "requests") as file:
        assert file.read() == b"a\nb\n"
    thread.join()
    assert said == [f"waiting for requests from the pipe {path}"]


def test_a_pipe_with_a_writer_prints_no_notice(capsys):
    reader, writer = os.pipe()
    os.write(writer, b"a\n")
    os.close(writer)
    with open_input(_streams.Path(f"/dev/fd/{reader}"), "requests") as file:
        assert file.read() == b"a\n"
    os.close(reader)
    assert capsys.readouterr().err == ""


def test_reports_a_missing_input_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_input(tmp_path / "none", "requests")
    with pytest.raises(ConfigError, match="must be a file or a pipe"):
        open_input(tmp_path, "requests")
