"""Clients that are slow, numerous or gone, with short limits. test_http.py has a server with its usual limits."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
import uvicorn
from chat_parts import write_chat_model
from serve_parts import slow_down

from transformer.cli._services import make_service
from transformer.inference import open_model
from transformer.serve import _bodies, _server

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
BODY = b'{"prompt": "a", "max_tokens": 2}'
SHORT = 0.5
"""seconds, instead of 10 and 30"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(write_chat_model(tmp_path_factory.mktemp("models") / "tiny"))


def service_of(opened):
    service = make_service(opened, slots=2, max_tokens=128, api_key=None, local_only=True)
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
def test_a_slow_head_is_cut(address):
    """Slowloris: one byte at a time, more slowly than the limit allows."""
    began = time.monotonic()
    assert exchange(address, *[bytes([byte]) for byte in request()], pause=0.05) == b""
    assert SHORT * 0.9 < time.monotonic() - began < 20
    assert is_served(address)


def test_a_silent_connection_is_cut(address):
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


def test_too_many_connections_are_closed(address):
    """Others are served as soon as there is room."""
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection(address, timeout=30))
        time.sleep(0.1)
        assert exchange(address, request()) == b""
    deadline = time.monotonic() + 20
    while not is_served(address):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_large_head_is_refused(address):
    got = exchange(address, HEAD.encode() + b"X: " + b"x" * 2 * _server.MOST_HEAD_BYTES + b"\r\n\r\n")
    assert got[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b""), got[:100]
    assert is_served(address)


@pytest.mark.parametrize(
    "head", [b"Content-Length: -1", b"Content-Length: 1\r\nContent-Length: 2", b"X y: 1", b"\0: 1"]
)
def test_invalid_heads(address, head):
    assert exchange(address, HEAD.encode() + head + b"\r\n\r\n").startswith(b"HTTP/1.1 400")


@pytest.fixture(scope="module")
def ending_service(opened):
    """A service that its only test ends."""
    return service_of(opened)


def test_sigterm_ends_within_a_bound(ending_service, monkeypatch):
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


def test_integers_that_a_float_can_represent():
    assert all(map(_bodies._is_small, (0, 2**53, -(2**53))))
    assert not any(map(_bodies._is_small, (2**53 + 1, True, 1.0)))
