"""Batches that several processes answer: the split, the join, and a process that is killed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_parts import write_chat_model
from training_recipes import xla_flags

from transformer.__main__ import main
from transformer.cli._arguments import parse
from transformer.cli._batch import AnswerBatch
from transformer.config._checks import ConfigError
from transformer.serve._batch import answer_lines
from transformer.serve._shards import Shard, answered, join_parts, parts

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--slots", "2", "--max-tokens", "128"]


def answer(name, text="a"):
    return json.dumps({"id": text, "custom_id": name, "response": {}, "error": None}).encode() + b"\n"


def bad_answer(number):
    return json.dumps({"custom_id": None, "response": None, "error": {"line": number}}).encode() + b"\n"


@pytest.mark.parametrize(("items", "count"), [(7, 3), (2, 5), (6, 1), (0, 2)])
def test_each_request_belongs_to_one_shard(items, count):
    shares = [Shard(index, count).select(list(range(items))) for index in range(count)]
    assert sorted(one for share in shares for one in share) == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "0/1000000", "1/2/3", "a/b", " 0/2"])
def test_rejects_invalid_shards(text):
    with pytest.raises(ConfigError, match=r"--shard.*INDEX/COUNT"):
        Shard.parse(text)


def test_the_last_process_merges_the_answers(tmp_path):
    """An unfinished last line, an answer that is there twice, and files of another number of processes."""
    output, keys = tmp_path / "answers[1].jsonl", ["a", "b", "c", 4]
    Shard(0, 2).part(output).write_bytes(answer("a") + answer("b")[:-1])
    Shard(1, 2).part(output).write_bytes(answer("c", "first"))
    assert answered(output) == {"a", "c"}
    assert not join_parts(output, keys)
    assert not output.exists()
    Shard(1, 3).part(output).write_bytes(answer("c", "second") + answer("b") + bad_answer(4))
    assert len(parts(output)) == 3
    assert join_parts(output, keys)
    assert parts(output) == []
    assert [path.name for path in tmp_path.iterdir()] == [output.name], "no temporary file is left"
    assert output.read_bytes() == answer("a") + answer("c", "first") + answer("b") + bad_answer(4)
    assert join_parts(output, keys), "joined by another process"


def test_existing_answers_in_the_output_are_kept(tmp_path):
    """As after a run without shards, or after new lines of the requests."""
    output = tmp_path / "answers.jsonl"
    output.write_bytes(answer("a"))
    Shard(0, 1).part(output).write_bytes(answer("b"))
    assert join_parts(output, ["a", "b"])
    assert [key for key, _ in answer_lines(output)] == ["a", "b"]


def test_answers_of_several_machines_are_merged_without_a_model(tmp_path, capsys):
    output, requests = tmp_path / "answers.jsonl", tmp_path / "requests.jsonl"
    one = {"url": "/v1/completions", "body": {"prompt": "a"}}
    requests.write_text("".join(json.dumps({"custom_id": name, **one}) + "\n" for name in "abc"))
    Shard(0, 2).part(output).write_bytes(answer("a") + answer("c"))
    Shard(1, 2).part(output).write_bytes(answer("b"))
    assert main(["batch", str(tmp_path / "nowhere"), str(requests), "--output", str(output), "--shard", "1/2"]) == 0
    assert "has all answers" in capsys.readouterr().err
    assert output.read_bytes() == answer("a") + answer("c") + answer("b")
    assert parts(output) == []


def test_two_processes_merge_at_the_same_time(tmp_path, monkeypatch):
    """It removes a file after this process has seen that all answers are there: its output stays."""
    output, keys = tmp_path / "answers.jsonl", ["a", "b"]
    for index, name in enumerate(keys):
        Shard(index, 2).part(output).write_bytes(answer(name))

    def seen(path):
        found = answered(path)
        monkeypatch.undo()
        assert join_parts(path, keys)
        return found

    monkeypatch.setattr("transformer.serve._shards.answered", seen)
    assert join_parts(output, keys)
    assert output.read_bytes() == answer("a") + answer("b")
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def test_reports_invalid_options(tmp_path, capsys):
    requests = tmp_path / "requests.jsonl"
    requests.write_text("")
    assert main(["batch", str(tmp_path), str(requests), "--shard", "0/2"]) == 2
    assert "--shard needs --output" in capsys.readouterr().err
    assert main(["batch", str(tmp_path), str(requests), "--shard", "2/2"]) == 2
    assert "--shard must be INDEX/COUNT" in capsys.readouterr().err


def test_the_documented_job_script_runs(tmp_path):
    """Its shell command passes the index of the pod and the number of pods."""
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"^```text\n(apiVersion: .*?)^```", (ROOT / "docs" / "serving.md").read_text(), re.M | re.S)
    spec = yaml.safe_load(text)["spec"]
    assert spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "3"}
    command = [*container["command"], *container["args"]]
    words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:3] == ["-m", "transformer", "batch"]
    assert Shard.parse(parse(AnswerBatch, "batch", words[3:]).shard) == Shard(3, spec["completions"])


def written(folder):
    """Write a model; return its directory and 80 requests."""
    draws = {"max_tokens": 40, "temperature": 1.2}
    lines = [
        {"custom_id": f"{i}", "url": "/v1/completions", "body": {"prompt": "Hello" * (1 + i % 7), **draws}}
        for i in range(80)
    ]
    return write_chat_model(folder / "tiny"), lines


def texts(path):
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    found = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers if one["response"]}
    assert len(found) + sum(one["error"] is not None for one in answers) == len(answers), "one answer each"
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "a.jsonl", "--shard", "0/2"], "--shard is for processes that are not connected"),
        ([], "--parallel.coordinator needs --output, a file on a file system that all processes share"),
        (["--output", "a.jsonl"], "r.jsonl"),
    ],
)
def test_reports_mistakes_of_processes_before_they_connect(tmp_path, capsys, words, message):
    place = ["--parallel.coordinator", "nowhere:1", "--parallel.num-processes", "2", "--parallel.process-id", "1"]
    assert main(["batch", str(tmp_path), str(tmp_path / "r.jsonl"), *words, *place]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def answered_on_one_device(tmp_path_factory):
    """The command that answers three requests, without its output, and the answers of one device."""
    folder = tmp_path_factory.mktemp("batch")
    lines = [
        {"custom_id": str(i), "url": "/v1/completions", "body": {"prompt": "Hello" * i, "max_tokens": 9}}
        for i in range(1, 4)
    ]
    (folder / "r.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    command = ["batch", str(write_chat_model(folder / "tiny")), str(folder / "r.jsonl"), "--slots", "2"]
    command += ["--max-tokens", "32", "--output"]
    assert main([*command, str(folder / "one.jsonl")]) == 0
    return command, texts(folder / "one.jsonl")


def test_one_process_shards_the_model_over_devices(answered_on_one_device, tmp_path, capsys):
    command, wanted = answered_on_one_device
    assert main([*command, str(tmp_path / "two.jsonl"), "--parallel.tensor", "2"]) == 0
    assert texts(tmp_path / "two.jsonl") == wanted
    assert main([*command, str(tmp_path / "nine.jsonl"), "--parallel.tensor", "9"]) == 2
    assert "need 9 devices, but there are 8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_two_processes_survives_a_killed_one(tmp_path):
    """The answers are those of one process; what was answered before the kill is not computed again."""
    model, lines = written(tmp_path)
    requests, output, whole = (tmp_path / name for name in ("requests.jsonl", "answers.jsonl", "whole.jsonl"))
    requests.write_text("".join(json.dumps(one) + "\n" for one in [*lines, {"custom_id": "bad"}]))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}

    def start(index):
        command = [sys.executable, "-m", "transformer", "batch", str(model), str(requests), *SIZES]
        command += ["--output", str(output), "--shard", f"{index}/2"]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    processes = [start(0), start(1)]
    try:
        part, deadline = Shard(0, 2).part(output), time.monotonic() + 300
        while not part.exists() or part.read_bytes().count(b"\n") < 3:
            assert time.monotonic() < deadline
            assert processes[0].poll() is None, processes[0].stderr.read()
            time.sleep(0.002)
        processes[0].send_signal(signal.SIGKILL)
        assert processes[0].wait() == -signal.SIGKILL
        before = part.read_bytes()
        assert 3 <= before.count(b"\n") < 41, "it was killed in the middle"
        message = processes[1].communicate(timeout=300)[1]
        assert processes[1].returncode == 0, message
        assert "shard 1/2 is complete; other shards are not complete yet" in message
        assert not output.exists()
        processes.append(start(0))
        message = processes[2].communicate(timeout=300)[1]
        assert processes[2].returncode == 0, message
        assert "of 41 requests are answered already" in message
    finally:
        for process in processes:
            process.kill()
    assert output.read_bytes().startswith(before[: before.rindex(b"\n") + 1]), "answers are kept"
    assert parts(output) == []
    assert main(["batch", str(model), str(requests), "--output", str(whole), *SIZES]) == 0
    assert texts(output) == texts(whole)
    assert len(texts(output)) == 80


class Connected:
    """Two processes of `batch` that JAX connects, with `devices` devices each."""

    def __init__(self, command, devices):
        with socket.create_server(("127.0.0.1", 0)) as free:
            place = ["--parallel.num-processes", "2", "--parallel.coordinator", f"localhost:{free.getsockname()[1]}"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices)}
        self.members = [
            subprocess.Popen(
                [sys.executable, "-m", "transformer", "batch", *command, *place, "--parallel.process-id", str(index)],
                cwd=ROOT,
                env=environment,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
            for index in range(2)
        ]

    def ended(self):
        """Wait for both; return their exit codes and messages."""
        try:
            messages = [member.communicate(timeout=300)[1] for member in self.members]
        finally:
            for member in self.members:
                member.kill()
        return [member.returncode for member in self.members], messages


@pytest.mark.slow
def test_connected_processes_share_the_work(tmp_path):
    """Each process has a model, on one device or two, or both have one together; then a process is lost."""
    model, lines = written(tmp_path)
    requests, whole = tmp_path / "requests.jsonl", tmp_path / "whole.jsonl"
    requests.write_text("".join(json.dumps(one) + "\n" for one in [*lines[:24], {"custom_id": "bad"}]))
    assert main(["batch", str(model), str(requests), "--output", str(whole), *SIZES]) == 0
    for devices, tensor, own in ((2, 2, [12, 12]), (1, 2, [24])):
        output = tmp_path / f"{devices}-{tensor}.jsonl"
        command = [str(model), str(requests), "--output", str(output), *SIZES, "--parallel.tensor", str(tensor)]
        codes, messages = Connected(command, devices).ended()
        assert codes == [0, 0], messages
        counts = [int(n) for text in messages for n in re.findall(r"^(\d+) requests in ", text, re.M)]
        assert counts == own
        assert texts(output) == texts(whole)
        assert parts(output) == []
    kept = output.read_bytes().splitlines(keepends=True)[:8]
    Shard(1, 2).part(output).write_bytes(b"".join(kept))
    output.unlink()
    command = command[:-2]
    processes, deadline = Connected(command, 1), time.monotonic() + 300
    while not Shard(0, 2).part(output).exists():  # then they are connected
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes.members[1].kill()
    codes, messages = processes.ended()
    assert 0 not in codes
    assert re.search(r"error: .*Start all (again|processes)", messages[0]), messages[0]
    codes, messages = Connected(command, 1).ended()
    assert codes == [0, 0], messages
    assert set(kept) <= set(output.read_bytes().splitlines(keepends=True)), "answers are kept"
    assert texts(output) == texts(whole)
