"""Run the HTTP interface with uvicorn: limits of connections, and an orderly end."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from transformer.config._checks import ConfigError
from transformer.serve._http import HTTPService

HEAD_SECONDS = 10.0
"""time in which the head of a request must arrive"""
MOST_CONNECTIONS = 1000
"""maximum number of open connections; more are closed at once"""
MOST_HEAD_BYTES = 64 * 2**10
"""maximum size of the head of a request"""
DRAIN_SECONDS = 30
"""time that the texts have to end after SIGTERM"""


class _Protocol(H11Protocol):
    """HTTP that closes connections beyond a maximum, and those whose request does not begin or end in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        self._wait_for_head()
        super().data_received(data)
        if self._timer is not None and self.conn.their_state is not h11.IDLE:
            self._timer.cancel()
            self._timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


def check_address(host: str, api_key: str | None, anyone: bool) -> bool:
    """Return whether a host is the loopback address.

    Raises:
        ConfigError: it is not, and neither an API key nor `anyone` is given; or the key is not usable.
    """
    if api_key is not None and (len(api_key) < 8 or not api_key.isascii() or not api_key.isprintable()):
        raise ConfigError("an API key must have at least 8 printable ASCII characters. Pass a longer one.")
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local and api_key is None and not anyone:
        raise ConfigError(
            f"with --host {host}, everybody who can reach this machine could use the model: expected --api-key, got "
            "none. Pass --api-key, or --allow-anyone if access is restricted in another way."
        )
    return is_local


def settings(service: HTTPService, drain_seconds: int = DRAIN_SECONDS) -> uvicorn.Config:
    """Return the settings of uvicorn for a service."""
    return uvicorn.Config(
        service.application(),
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_level="error",  # a warning for each invalid request would let a client fill the log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=drain_seconds,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
    )


def run(
    service: HTTPService, host: str, port: int, ready: Callable[[str], None], *, drain_seconds: int = DRAIN_SECONDS
) -> None:
    """Serve until SIGTERM or Ctrl-C; then accept no more connections, and finish the texts within `drain_seconds`.

    Args:
        service: the model; it is started here, and closed at the end.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        ready: called with the URL when connections are accepted.
        drain_seconds: time that the texts have to end.

    Raises:
        OSError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from error

    def ignore(number: int, frame: Any) -> None:
        """Uvicorn repeats the signal at its end, when the default handler would kill the process."""

    before = signal.signal(signal.SIGTERM, ignore)
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    service.start()
    try:
        ready(f"http://{shown}:{listener.getsockname()[1]}/v1")  # the kernel accepts connections from now on
        uvicorn.Server(settings(service, drain_seconds)).run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
        listener.close()
        service.close()
