"""Run the HTTP interface with uvicorn: limits of connections, and an orderly end."""

from __future__ import annotations

import asyncio
import collections
import ipaddress
import itertools
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from transformer.config._checks import ConfigError
from transformer.serve._errors import APIError
from transformer.serve._http import HTTPService

HEAD_SECONDS = 10.0
"""time in which the head of a request must arrive"""
MOST_CONNECTIONS = 1000
"""maximum number of open connections; fewer if the process may open few files"""
OTHER_FILES = 128
"""files that a server has open besides its connections"""
MOST_HEAD_BYTES = 64 * 2**10
"""maximum size of the head of a request"""
DRAIN_SECONDS = 30
"""time that the texts have to end after SIGTERM"""


_ORDER = itertools.count()


class _Connection(h11.Connection):
    """Rejects heads that are too large, even if they arrive in one piece, and those whose end is ambiguous."""

    refused = h11.RemoteProtocolError("Invalid HTTP request received.")
    """why the last request was refused"""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event, as the base class."""
        before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                _check_head(event, before - len(self.trailing_data[0]))
        except h11.RemoteProtocolError as error:
            self.refused = _head_too_large() if error.error_status_hint == 431 else error
            raise
        return event


def _head_too_large() -> h11.RemoteProtocolError:
    message = f"The head of a request must have at most {MOST_HEAD_BYTES} bytes."
    return h11.RemoteProtocolError(message, error_status_hint=431)


def _check_head(request: h11.Request, size: int) -> None:
    if size > MOST_HEAD_BYTES:
        raise _head_too_large()
    names = {name for name, _ in request.headers}
    # Another server on the way could see the end of this request elsewhere (RFC 9112, sections 6.1 and 6.3).
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        message = "A request must not have Transfer-Encoding together with Content-Length, or with HTTP/1.0."
        raise h11.RemoteProtocolError(message, error_status_hint=400)


class _Protocol(H11Protocol):
    """HTTP that closes connections whose request does not begin or end in time.

    Beyond the maximum of connections, it closes the one that has waited longest for its client, of the address with the
    most connections: so a client that opens many, and sends nothing, does not lock out the others.
    """

    _timer: asyncio.TimerHandle | None = None
    _waits_since: int = 0
    """number in the order in which connections began to wait; times can be equal"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _Connection(h11.SERVER, MOST_HEAD_BYTES)
        if len(self.connections) > most_connections():
            self._make_room()
        self._wait_for_head()

    def _make_room(self) -> None:
        """Close a connection whose client has not sent a whole request; if there is none, this one."""
        addresses = collections.Counter(one.client and one.client[0] for one in self.connections)
        waiting = [one for one in self.connections if one is not self and one.waits_for_client]
        waiting.sort(key=lambda one: (-addresses[one.client and one.client[0]], one._waits_since))
        (waiting[0] if waiting else self).transport.abort()

    @property
    def waits_for_client(self) -> bool:
        """Whether the connection is open, and its client has not sent a whole request."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that was refused, unless an answer to an earlier one is being sent, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = APIError(self.conn.refused.error_status_hint, f"{self.conn.refused}")
            answer = error.response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            parts = h11.Response(status_code=error.status, headers=headers), h11.Data(data=answer.body)
            for part in (*parts, h11.EndOfMessage()):
                self.transport.write(self.conn.send(part))
        self.transport.close()

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
            self._waits_since = next(_ORDER)
            self._timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


def most_connections() -> int:
    """Return the maximum number of open connections: without a free file, the server could accept none for a second."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, files - OTHER_FILES))


def check_address(host: str, api_key: str | None, anyone: bool) -> bool:
    """Return whether a host is the loopback address.

    Raise ConfigError for another host without an API key, unless `anyone` is set, and for a key that is not usable.
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

    The service is started here, and closed at the end. Port 0 is a free one. `ready` is called with the URL when
    connections are accepted.

    Raises:
        OSError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from error

    def ignore(number: int, frame: FrameType | None) -> None:
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
