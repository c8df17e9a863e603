"""Clients that are slow, numerous or gone, with short limits. test_http.py has a server with its usual limits."""

import contextlib
import os
import re
import resource
import signal
import socket
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import uvicorn
from chat_parts import write_chat_model
from serve_parts import slow_down

from transformer.cli._services import ServiceSettings, make_service
from transformer.generate import Beam, Sampling
from transformer.generate._rows import RowSampling
from transformer.inference import open_model
from transformer.serve import _bodies, _server, _translations
from transformer.serve._errors import APIError

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
BODY = b'{"prompt": "a", "max_tokens": 2}'
NUMBERS = [1e300, -1e300, 1e-300, float("inf"), float("nan")]
SHORT = 0.5
"""seconds, instead of 10 and 30"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(write_chat_model(tmp_path_factory.mktemp("models") / "tiny"))


def service_of(opened):
    service = make_service(opened, ServiceSettings(slots=2, max_tokens=128))
    service.warm_up(lambda done, total: None)
    return service


@pytest.fixture(scope="module")
def address(opened):
    """The address of a server in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_server, "HEAD_SECONDS", SHORT)
        patch.setattr(_bodies, "BODY_SECONDS", SHORT)
        patch.setattr(_server, "MOST_CONNECTIONS", 8)
        service = service_of(opened)
        service.start()
        server, listener = uvicorn.Server(_server.settings(service)), socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join()
        service.close()


def exchange(address, *parts, pause=0.0):
    """Send parts with a pause before each but the first; return what is received until the server closes."""
    with socket.create_connection(address, timeout=30) as connection:
        for number, part in enumerate(parts):
            time.sleep(pause if number else 0)
            try:
                connection.sendall(part)
            except OSError:  # closed by the server
                break
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                got += part
    return got


def request(body=BODY, length=None):
    return f"{HEAD}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


def is_served(address):
    return exchange(address, request()).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_slow_request_head_times_out(address):
    """Slowloris: one byte at a time, more slowly than the limit allows."""
    began = time.monotonic()
    assert exchange(address, *[bytes([byte]) for byte in request()], pause=0.05) == b""
    assert SHORT * 0.9 < time.monotonic() - began < 20
    assert is_served(address)


def test_a_silent_connection_times_out(address):
    began = time.monotonic()
    assert exchange(address) == b""
    assert SHORT * 0.9 < time.monotonic() - began < 20


def test_a_slow_body_is_refused(address):
    """The limit is for the whole body: each byte is in time."""
    got = exchange(address, request(b"", length=1000), *[b" "] * 40, pause=0.05)
    assert got.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within" in got
    assert is_served(address)


def test_a_body_that_never_ends_is_refused(address):
    assert exchange(address, request(b"{", length=1000)).startswith(b"HTTP/1.1 408")


def opened_connections(stack, address, count, sent=b""):
    made = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(count)]
    for one in made:
        one.sendall(sent)
    return made


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTT", request(b"{", length=1000)], ids=["silent", "part of a head", "part of a body"]
)
def test_idle_connections_are_closed_for_new_ones(address, monkeypatch, sent):
    """The oldest is closed. Another client is served at once, not when their time ends."""
    monkeypatch.setattr(_server, "HEAD_SECONDS", 60.0)
    monkeypatch.setattr(_bodies, "BODY_SECONDS", 60.0)
    with contextlib.ExitStack() as stack:
        silent = opened_connections(stack, address, 8, sent)
        time.sleep(0.1)
        assert is_served(address)
        silent[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""


def test_a_connection_with_a_running_request_is_not_closed(address, opened, monkeypatch):
    """If all are answered, a further connection is closed."""
    monkeypatch.setattr(_server, "HEAD_SECONDS", 60.0)
    with contextlib.ExitStack() as stack:
        busy = request(b'{"prompt": "a", "max_tokens": 100, "stream": true, "temperature": 0}')
        answered = opened_connections(stack, address, 2, busy)
        for one in answered:
            assert one.recv(1)  # its answer has begun
        opened_connections(stack, address, 20)
        for one in answered:
            parts = b""
            while part := one.recv(65536):
                parts += part
            assert b"[DONE]" in parts


class Connected:
    """A connection of a client with an address, which waits for its client or not."""

    def __init__(self, address, since, waits=True):
        self.client, self._waits_since, self.waits_for_client = (address, 1), since, waits
        self.aborted = []
        self.transport = SimpleNamespace(abort=lambda: self.aborted.append(True))


@pytest.mark.parametrize(
    ("others", "closed"),
    [
        ([("a", 1), ("b", 2), ("b", 3)], 1),  # of the address with the most, the oldest
        ([("a", 1), ("b", 2, False), ("b", 3, False)], 0),
        ([("a", 1, False), ("b", 2, False)], None),  # itself
    ],
)
def test_selects_the_connection_to_close(others, closed):
    made = [Connected(*one) for one in others]
    itself = Connected("c", 9)
    itself.connections = {*made, itself}
    _server._Protocol._make_room(itself)
    assert [bool(one.aborted) for one in made] == [number == closed for number in range(len(made))]
    assert bool(itself.aborted) == (closed is None)


def test_the_connection_limit_leaves_file_descriptors_for_the_server(monkeypatch):
    for files, expected in ((300, 172), (1024, 896), (20_000, 1000), (10, 1), (resource.RLIM_INFINITY, 1000)):
        monkeypatch.setattr(_server, "MOST_CONNECTIONS", 1000)
        monkeypatch.setattr(resource, "getrlimit", lambda which, files=files: (files, files))
        assert _server.most_connections() == expected


@pytest.mark.parametrize("size", [_server.MOST_HEAD_BYTES + 100, 2 * _server.MOST_HEAD_BYTES])
def test_a_large_head_is_refused(address, size):
    """Also if it arrives at once, and one below the limit is not."""
    got = exchange(address, HEAD.encode() + b"X: " + b"x" * size + b"\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 431"), got[:100]
    assert b"at most 65536 bytes" in got
    padding = f"X: {'x' * (_server.MOST_HEAD_BYTES - 300)}\r\n".encode()
    assert exchange(address, request().replace(b"Host", padding + b"Host")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head",
    [
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n",
        "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\n",
    ],
)
def test_an_ambiguous_request_length_is_rejected_and_closes_the_connection(address, head):
    """Content-Length and Transfer-Encoding: a proxy could see another request behind it (RFC 9112, section 6.1)."""
    chunks = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    rest = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    got = exchange(address, head.encode() + rest + chunks + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 400"), got[:100]
    assert b"Transfer-Encoding" in got
    assert got.count(b"HTTP/1.1") == 1
    usual = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks
    assert exchange(address, usual).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head", [b"Content-Length: -1", b"Content-Length: 1\r\nContent-Length: 2", b"X y: 1", b"\0: 1"]
)
def test_rejects_invalid_request_heads(address, head):
    assert exchange(address, HEAD.encode() + head + b"\r\n\r\n").startswith(b"HTTP/1.1 400")


@pytest.fixture(scope="module")
def ending_service(opened):
    """A service that its only test ends."""
    return service_of(opened)


def test_sigterm_exits_within_a_time_limit(ending_service, monkeypatch):
    """A text that takes longer than the time to end is cut, its client gets an end, and the server returns."""
    service = ending_service
    slow_down(monkeypatch, service.engine)
    got, threads = [], []

    def ask(url):
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(request(b'{"prompt": "a", "max_tokens": 120, "stream": true, "temperature": 0}'))
            got.append(connection.recv(65536))
            times.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    got.append(part)

    def ready(url):
        threads.append(threading.Thread(target=ask, args=(url,)))
        threads[0].start()

    times = []
    _server.run(service, "127.0.0.1", 0, ready, drain_seconds=1)
    assert time.monotonic() - times[0] < 15
    threads[0].join(timeout=30)
    assert not threads[0].is_alive()
    text = b"".join(got)
    assert text.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in text, "it was cut"
    assert service.failure is None, "by the end of the time, and not by a fault"
    assert service.load.running == 0


def test_accepts_integers_that_a_float_represents():
    assert all(map(_bodies._is_small, (0, 2**53, -(2**53))))
    assert not any(map(_bodies._is_small, (2**53 + 1, True, 1.0)))


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_numbers_are_used_or_rejected_with_their_range(name, value):
    """Whatever the number is, the sampling that it gives is finite in float32."""
    try:
        sampling = _bodies.sampling_of({name: value}, Sampling(), ())
    except APIError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert (refused.status, refused.param) == (400, name)
        assert re.search(r"must be .*(from|above|at least) -?[0-9.]+", str(refused))
        return
    with np.errstate(all="raise"):
        row = RowSampling.of(sampling, 11, top=False)
    assert float(row.temperature) > 0
    assert float(row.top_p) > 0
    assert all(np.isfinite(float(one)) for one in jax.tree.leaves(row.penalties))
    assert abs(value) < 1000


@pytest.mark.parametrize("value", [*NUMBERS[3:], -1, 10**400, "1", True, None, [1]], ids=lambda value: str(value)[:9])
def test_an_invalid_length_penalty_is_rejected_with_its_range(value):
    with pytest.raises(APIError, match="length_penalty must be a number from 0 to 8") as caught:
        _translations._beam_of({"length_penalty": value}, Beam())
    assert caught.value.param == "length_penalty"
