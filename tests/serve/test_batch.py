"""Batches of requests: the answers of HTTP, bad lines, and runs that are killed and continued."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_parts import write_chat_model

from transformer.__main__ import main
from transformer.cli._services import ServiceSettings, make_service
from transformer.config._checks import ConfigError
from transformer.inference import open_model
from transformer.serve._batch import Answers, answer_batch, read_batch

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--slots", "2", "--max-tokens", "128"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def service(model):
    made = make_service(open_model(model), ServiceSettings(slots=2, max_tokens=128, queue=64))
    made.start()
    yield made
    made.close()


def line(name, url="/v1/completions", **body):
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write_lines(path, lines):
    path.write_bytes(b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines))
    return path


def read(path):
    with path.open("rb") as file:
        return read_batch(file, str(path))


def read_lines(path):
    return [json.loads(one) for one in path.read_text().splitlines()]


def texts(answers):
    """Return the text of each answer by custom_id; each has one answer."""
    found = {one["custom_id"]: one["response"]["body"]["choices"][0] for one in answers}
    assert len(found) == len(answers)
    return {name: choice.get("text") or choice["message"]["content"] for name, choice in found.items()}


def answered(service, path):
    answers = []
    requests, bad = read(path)
    answer_batch(service, requests, answers.append, at_once=4)
    return answers, bad


def test_answers_equal_the_http_server(service, tmp_path):
    from starlette.testclient import TestClient

    messages = [{"role": "user", "content": "Hello"}]
    lines = [line(f"text {i}", prompt="a" * (i + 1), max_tokens=5, seed=i, n=2) for i in range(6)]
    lines += [line("chat", "/v1/chat/completions", model="tiny", messages=messages, max_tokens=6, temperature=0.0)]
    answers, bad = answered(service, write_lines(tmp_path / "requests.jsonl", lines))
    assert not bad
    found = texts(answers)
    client = TestClient(service.application(), base_url="http://localhost")
    for one in lines:
        wanted = client.post(one["url"], json=one["body"]).json()
        assert texts([{"custom_id": "", "response": {"body": wanted}}])[""] == found[one["custom_id"]]
    assert {one["response"]["status_code"] for one in answers} == {200}
    assert all(one["error"] is None and one["id"].startswith("batch_req_") for one in answers)


def test_a_rejected_request_gets_an_error_answer(service, tmp_path):
    lines = [
        line("wrong", prompt="a", temprature=1),
        line("other", prompt="a", model="gpt-5"),
        line("right", prompt="a"),
    ]
    answers, _ = answered(service, write_lines(tmp_path / "requests.jsonl", lines))
    statuses = {one["custom_id"]: one["response"]["status_code"] for one in answers}
    assert statuses == {"wrong": 400, "other": 404, "right": 200}
    (wrong,) = (one["response"]["body"]["error"] for one in answers if one["custom_id"] == "wrong")
    assert wrong["param"] == "temprature"


BAD = [
    (b"{\n", "expected a JSON object, got '{"),
    (b"[1]\n", "expected a JSON object, got list"),
    (b"\xff\xfe\n", "expected a JSON object"),
    (b"[" * 100_000 + b"\n", "expected a JSON object"),
    ({"custom_id": 3}, "custom_id must be a text"),
    ({**line("a", prompt="a"), "method": "GET"}, "method must be POST, got 'GET'"),
    (line("b", "/v1/files"), "url must be one of /v1/chat/completions"),
    ({**line("c"), "body": "x"}, "body must be a JSON object, got str"),
    (line("d", stream=True), "stream must be false"),
    (line("good", prompt="b"), "is that of an earlier line"),
]


@pytest.mark.programs(10, reason="the command opens a model and compiles all programs of a server")
def test_invalid_lines_get_error_answers_and_valid_lines_continue(model, tmp_path, capsys):
    """Also when the run is continued: each line has one answer."""
    lines = [line("good", prompt="a", max_tokens=2), *(bad for bad, _ in BAD), b"\n"]
    requests, output = write_lines(tmp_path / "requests.jsonl", lines), tmp_path / "answers.jsonl"
    assert main(["batch", str(model), str(requests), *SIZES]) == 0
    said = capsys.readouterr().out
    output.write_text(said)
    answers = [json.loads(one) for one in said.splitlines()]
    assert len(answers) == 11
    assert texts([one for one in answers if one["response"]]).keys() == {"good"}
    errors = {one["error"]["line"]: one["error"]["message"] for one in answers if one["error"]}
    for number, (_, message) in enumerate(BAD, 2):
        assert errors[number].startswith(f"line {number}: ")
        assert message in errors[number]
    assert main(["batch", str(model), str(requests), "--output", str(output), *SIZES]) == 0
    assert read_lines(output) == answers
    assert "11 of 11 requests are answered already" in capsys.readouterr().err


@pytest.mark.programs(10, reason="the command opens a model and compiles all programs of a server")
def test_a_killed_run_resumes(model, service, tmp_path):
    """SIGKILL in the middle, and half a line at the end: the answers are those of one whole run."""
    draws = {"max_tokens": 40, "temperature": 1.2}
    lines = [line(f"request {i}", prompt="Hello" * (1 + i % 7), **draws) for i in range(60)]
    requests, output = write_lines(tmp_path / "requests.jsonl", lines), tmp_path / "answers.jsonl"
    command = ["batch", str(model), str(requests)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    killed = subprocess.Popen(
        [sys.executable, "-m", "transformer", *command, "--output", str(output), *SIZES],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not output.exists() or output.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline
        assert killed.poll() is None, killed.stderr.read().decode()
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert killed.stderr.read() == b"", "no progress into a pipe"
    before = output.read_bytes()
    assert 3 <= before.count(b"\n") < 60, "it was killed in the middle"
    output.write_bytes(before + b'{"id": "batch_req_1", "custom_id": "request 5", "resp')

    assert main([*command, "--output", str(output), *SIZES]) == 0
    assert output.read_bytes().startswith(before), "answers are kept"
    whole, _ = answered(service, requests)
    assert texts(read_lines(output)) == texts(whole)
    assert len(whole) == 60
    assert len(set(texts(whole).values())) > 30, "requests without a seed have different seeds"


def test_the_longest_requests_run_first(service, tmp_path, monkeypatch):
    """With one request at a time the answers are in the order of the work."""
    lines = [line(f"{i}", prompt="a" * i, max_tokens=2) for i in (10, 40, 20)]
    lines += [line("new", prompt="a", max_tokens=60)]
    requests, _ = read(write_lines(tmp_path / "requests.jsonl", lines))
    answers = []
    answer_batch(service, requests, answers.append, at_once=1)
    assert [one["custom_id"] for one in answers] == ["new", "40", "20", "10"]


def test_an_internal_failure_ends_the_run_without_an_answer(model, tmp_path, monkeypatch):
    made = make_service(open_model(model), ServiceSettings(slots=1, max_tokens=32))
    monkeypatch.setattr(made.engine._scheduler, "_read_part", lambda: 1 / 0)
    made.start()
    requests, _ = read(write_lines(tmp_path / "requests.jsonl", [line("a", prompt="a"), line("b", prompt="b")]))
    answers = []
    with pytest.raises(RuntimeError, match=r"\(ZeroDivisionError\)"):
        answer_batch(made, requests, answers.append, at_once=2)
    assert answers == []
    made.close()


def test_the_file_of_answers_is_protected(model, tmp_path, capsys):
    requests = write_lines(tmp_path / "requests.jsonl", [line("a", prompt="a")])
    before = requests.read_bytes()
    with pytest.raises(ConfigError, match=r"requests.jsonl.*1.*custom_id"):
        Answers(requests)
    assert main(["batch", str(model), str(requests), "--output", str(requests)]) == 2
    assert requests.read_bytes() == before
    output = tmp_path / "answers.jsonl"
    with Answers(output), pytest.raises(ConfigError, match="another process writes"):
        Answers(output)
    with Answers(output) as again:
        assert not again.keys


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: No such file"),
        ([], "REQUESTS is missing"),
        (["x.jsonl", "--slots", "0"], "--slots must be from 1"),
        (["x.jsonl", "--output", ""], "--output must name a file"),
    ],
)
def test_reports_invalid_arguments(model, words, message, capsys):
    assert main(["batch", str(model), *words]) == 2
    assert message in capsys.readouterr().err
