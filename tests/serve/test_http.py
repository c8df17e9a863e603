"""The HTTP interface: the client of OpenAI, raw sockets of hostile clients, and the command `serve`."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import openai
import pytest
from chat_parts import write_chat_model

from transformer.__main__ import main
from transformer.chat import Chat
from transformer.cli._services import ServiceSettings, make_service
from transformer.config._checks import ConfigError
from transformer.generate import Sampling, generate
from transformer.inference import open_model
from transformer.serve._server import check_address

KEY = "a-secret-key"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def opened(model):
    return open_model(model)


@pytest.fixture(scope="module")
def server(model):
    """A server in another process: 2 slots of 128 tokens, with a key."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "transformer", "serve", str(model), "--json", "--port", "0", "--slots", "2"]
    environment = {**os.environ, "TRANSFORMER_API_KEY": KEY, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [*command, "--max-tokens", "128"], cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said = b""
    while b"\n}" not in said:
        line = process.stdout.readline()
        assert line, process.stderr.read().decode()
        said += line
    yield {"process": process, **json.loads(said)}
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server["url"], api_key=KEY, max_retries=0, timeout=60)


def raw(server, request, *, wait=True):
    """Send bytes, and return the status and the body of the answer; without `wait` hang up at once."""
    host, port = server["url"].removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        try:
            connection.sendall(request)
        except (BrokenPipeError, ConnectionResetError):
            assert wait  # the server has answered before the end of the body
        if not wait:
            return None
        got = b""
        try:
            while part := connection.recv(65536):
                got += part
        except ConnectionResetError:
            assert got
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body.decode()


def post(path, body, *, key=KEY, kind="application/json", host="127.0.0.1", length=None):
    length = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Type: {kind}", f"Content-Length: {length}"]
    lines += ["Connection: close"] + ([f"Authorization: Bearer {key}"] if key else [])
    return "\r\n".join([*lines, "", ""]).encode() + body


def metric(server, name):
    request = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    _, _, text = raw(server, request.encode())
    return float(next((line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")), 0))


def test_lists_the_models(client):
    (card,) = client.models.list().data
    assert card.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.models.retrieve("other")


@pytest.fixture(scope="module")
def reply(opened):
    return Chat(opened.model, opened.params, opened.tokenizer).reply(MESSAGES, max_new_tokens=12)


def test_a_reply_equals_the_chat_command(client, opened, reply):
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=12)
    assert got.choices[0].message.content == reply.text
    assert got.choices[0].finish_reason == ("length" if reply.finish == "length" else "stop")
    assert got.usage.completion_tokens == len(reply.tokens)
    prompt = Chat(opened.model, opened.params, opened.tokenizer).encode(MESSAGES, add_generation_prompt=True)
    assert got.usage.prompt_tokens == len(prompt.ids)


def test_joined_stream_chunks_equal_the_whole_answer(client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 1.1, "seed": 5, "n": 2}
    options |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options)
    texts, tokens, finish, usage = ["", ""], [[], []], [None, None], None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert tokens == [choice.logprobs.content for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert texts[0] != texts[1]  # n: seeds 5 and 6
    assert all(len(token.top_logprobs) == 2 for token in tokens[0])


def test_answers_text_completions(client, opened):
    """A text, several texts, and token ids; tokens as those of `generate`."""
    rows = [opened.tokenizer.encode_source(text) for text in ("Hello world", "The answer")]
    greedy = {"max_new_tokens": 9, "sampling": Sampling(temperature=0.0), "eos_id": opened.eos_ids}
    wanted = [opened.tokenizer.decode(row) for row in generate(opened.model, opened.params, rows, **greedy)]
    common = {"model": "tiny", "max_tokens": 9, "temperature": 0}
    several = client.completions.create(prompt=["Hello world", "The answer"], logprobs=3, **common)
    assert [choice.text for choice in several.choices] == wanted
    assert client.completions.create(prompt=list(map(int, rows[1])), **common).choices[0].text == wanted[1]
    parts = client.completions.create(prompt="Hello world", stream=True, **common)
    assert "".join(part.choices[0].text for part in parts) == wanted[0]
    found = several.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == len(found.top_logprobs)
    assert found.text_offset[:2] == [0, len(found.tokens[0])]
    stop = wanted[0][2:4]
    cut = client.completions.create(prompt="Hello world", stop=stop, **common).choices[0]
    assert (cut.text, cut.finish_reason) == (wanted[0][: wanted[0].index(stop)], "stop")


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"frequency_penalty": 1e300}, "frequency_penalty"),
        ({"extra_body": {"repetition_penalty": -(10**400)}}, "repetition_penalty"),
        ({"extra_body": {"top_k": 1.5}}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "Hello " * 200}]}, None),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
    ],
)
def test_rejects_invalid_fields(client, changed, param):
    with pytest.raises((openai.BadRequestError, UnicodeEncodeError)) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **changed})
    if isinstance(caught.value, openai.BadRequestError):
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"
        assert "/" not in caught.value.body["message"].replace("/v1/", "")  # no path


def test_rejects_wrong_keys_and_hosts(server):
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()
    for key in (None, "another-key", KEY + "x"):
        status, head, text = raw(server, post("/v1/completions", body, key=key))
        assert status == 401
        assert json.loads(text)["error"]["code"] == "invalid_api_key"
        assert "www-authenticate" in head.lower()
    assert raw(server, b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")[0] == 200
    assert raw(server, post("/v1/completions", body))[0] == 200


def test_rejects_hostile_bodies(server):
    large = b"x" * (10 * 2**20)
    status, _, text = raw(server, post("/v1/completions", large))
    assert (status, "at most 4194304 bytes" in text) == (413, True)
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    chunked += f"Authorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunked += b"".join(b"100000\r\n" + b"x" * 0x100000 + b"\r\n" for _ in range(10)) + b"0\r\n\r\n"
    assert raw(server, chunked)[0] == 413
    for body in (b"{", b"\xff", b"[" * 100_000, b"[]", b'{"prompt": NaN}', b'{"seed": 1' + b"0" * 5000 + b"}", b""):
        status, _, text = raw(server, post("/v1/completions", body))
        assert status == 400, body[:20]
        assert "Traceback" not in text
    assert raw(server, post("/v1/completions", b"{}", kind="text/plain"))[0] == 415
    assert raw(server, post("/v1/nothing", b"{}"))[0] == 404
    assert raw(server, b"GET /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")[0] == 405
    assert raw(server, b"\x16\x03\x01 no HTTP\r\n\r\n")[0] == 400


def texts_in_work(server):
    return metric(server, "transformer_requests_running") + metric(server, "transformer_requests_waiting")


def texts_that_ended(server):
    reasons = ("stop", "length", "cancelled", "error")
    return sum(metric(server, f'transformer_finished_total{{reason="{reason}"}}') for reason in reasons)


def wait_until(server, condition):
    """Wait for a condition of a server that runs, however slow the machine is."""
    deadline = time.monotonic() + 600
    while not condition():
        assert server["process"].poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hang_up(server, body):
    """Hang up three requests that the server has read, and wait for their end."""
    host, port = server["url"].removeprefix("http://").removesuffix("/v1").split(":")
    before = texts_that_ended(server)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            connection.sendall(post("/v1/completions", body))
        # A server drops requests whose clients leave before it has read them.
        wait_until(server, lambda: texts_in_work(server) or texts_that_ended(server) > before)
    wait_until(server, lambda: not texts_in_work(server))


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_clients_free_their_slots(server, client, stream):
    body = json.dumps({"prompt": "Hello", "max_tokens": 120, "n": 16, "stream": stream, "stop_token_ids": []}).encode()
    cancelled = 'transformer_finished_total{reason="cancelled"}'
    before = metric(server, cancelled)
    raw(server, post("/v1/completions", body[:10], length=len(body)), wait=False)
    for _ in range(20):  # on a busy machine, the texts can be complete before this process hangs up
        hang_up(server, body)
        if metric(server, cancelled) >= before + 6:
            break
    else:
        pytest.fail("no text was cancelled")
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens <= 2


def test_a_full_queue_is_429(server, client):
    """More texts than 2 slots and 64 places in the queue: some are refused, the others are complete."""
    refused, answered = [], []

    def ask(number):
        try:
            got = client.completions.create(model="tiny", prompt="a", max_tokens=100, n=16, seed=number)
            answered.append(len(got.choices))
        except openai.RateLimitError as error:
            refused.append(error.response.headers["retry-after"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused
    assert set(refused) == {"1"}
    assert answered
    assert set(answered) == {16}


@pytest.mark.slow
def test_a_slow_request_head_times_out(server, client):
    """Slowloris: a byte of the head per second. The connection is closed after 10 seconds, and others are served."""
    host, port = server["url"].removeprefix("http://").removesuffix("/v1").split(":")
    started = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=1) as connection:
        while True:
            assert time.monotonic() - started < 20
            try:
                connection.sendall(b"G")
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                assert client.models.list().data
            except OSError:
                break
    assert time.monotonic() - started > 8


@pytest.mark.slow
def test_serves_many_connections(server, client):
    """More than 1,000 connections that send nothing: the oldest are closed, and others are served at once."""
    assert client.models.list().data
    host, port = server["url"].removeprefix("http://").removesuffix("/v1").split(":")
    connections = [socket.create_connection((host, int(port)), timeout=10) for _ in range(900)]
    try:
        assert client.models.list().data
        connections += [socket.create_connection((host, int(port)), timeout=10) for _ in range(150)]
        began = time.monotonic()
        with urllib.request.urlopen(server["url"].replace("/v1", "/health"), timeout=5) as response:
            assert response.status == 200
        assert time.monotonic() - began < 3  # less than the time for a head, after which all are closed
        connections[0].settimeout(1)
        with contextlib.suppress(ConnectionResetError):  # closed, too; an open connection is a TimeoutError
            assert connections[0].recv(1) == b""
    finally:
        for connection in connections:
            connection.close()
    time.sleep(1)
    assert client.models.list().data


def test_reports_metrics(server):
    assert metric(server, "transformer_generated_tokens_total") > 0
    assert metric(server, "transformer_first_token_seconds_count") > 0
    assert metric(server, "transformer_slots") == 2


def test_sigterm_finishes_running_requests(server, client):
    """Last: the server ends. A running stream is completed, and the exit code is 0."""
    stream = client.completions.create(model="tiny", prompt="a", max_tokens=120, temperature=0, stream=True)
    parts = [next(iter(stream))]
    server["process"].send_signal(signal.SIGTERM)
    parts += list(stream)
    assert parts[-1].choices[0].finish_reason in ("length", "stop")
    assert server["process"].wait(timeout=60) == 0
    said = server["process"].stderr.read().decode()
    assert said.startswith("serving tiny at http://127.0.0.1:")
    assert said.count("\n") == 1, said


def test_public_addresses_require_a_key():
    assert check_address("127.0.0.1", None, False)
    assert check_address("::1", None, False)
    assert check_address("localhost", None, False)
    assert not check_address("example.org", KEY, False)
    assert not check_address("0.0.0.0", KEY, False)
    assert not check_address("0.0.0.0", None, True)
    with pytest.raises(ConfigError, match="expected --api-key"):
        check_address("0.0.0.0", None, False)
    with pytest.raises(ConfigError, match="at least 8"):
        check_address("127.0.0.1", "short", False)


def test_a_local_server_without_a_key_rejects_other_host_headers(opened):
    """A page that resolves its own name to the loopback address (DNS rebinding) sends that name as the host."""
    from starlette.testclient import TestClient

    service = make_service(opened, ServiceSettings(slots=1, max_tokens=32))
    client = TestClient(service.application(), base_url="http://localhost:8000")
    assert client.get("/health").status_code == 200
    assert client.get("/health", headers={"host": "evil.example:8000"}).status_code == 403
    assert client.get("/health", headers={"host": "[::1]:8000"}).status_code == 200
    assert client.get("/health", headers={"host": ""}).status_code == 403


def test_a_model_with_a_tiny_context_is_an_error(opened):
    with pytest.raises(ValueError, match=r"^serve needs a model with a context of at least 16 tokens, got 8 in "):
        make_service(dataclasses.replace(opened, context=8), ServiceSettings(slots=1, max_tokens=None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "--port must be from 0 to 65535"),
        (["--slots", "0"], "--slots must be from 1"),
        (["--max-tokens", "3"], "--max-tokens must be from 16"),
        (["--max-tokens", "64", "--cache-tokens", "63"], "--cache-tokens must be at least 64"),
        (["--host", "0.0.0.0"], "expected --api-key"),
    ],
)
def test_rejects_invalid_options(model, options, message, capsys):
    assert main(["serve", str(model), *options]) == 2
    assert message in capsys.readouterr().err
