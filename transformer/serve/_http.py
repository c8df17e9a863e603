"""What all services share: the application of starlette, checks of host and key, errors as answers, and counters."""

from __future__ import annotations

import asyncio
import hmac
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from transformer.config._checks import nearest
from transformer.serve._errors import APIError, json_response
from transformer.serve._metrics import Metrics
from transformer.serve._page import page_response

Result = TypeVar("Result")
Handler = Callable[[HTTPRequest], Awaitable[Response]]
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""names under which a browser reaches the loopback address"""


@dataclass(frozen=True)
class Load:
    """How busy a service is."""

    running: int
    waiting: int
    slots: int
    """maximum number of requests that run at a time"""
    pages: int | None = None
    """number of pages of keys and values; None: the service has none"""


@dataclass(kw_only=True)
class HTTPService(ABC):
    """A model behind the HTTP interface. Each subclass serves one kind of model, and names its `endpoints`."""

    name: str
    """name of the model, which clients send as `model`"""
    api_key: str | None = None
    local_only: bool = True
    """refuse requests for other hosts than the loopback address, which a page in a browser could make"""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def failure(self) -> str | None:
        """Why the service can't answer any more; None: it can."""
        return None

    @property
    @abstractmethod
    def metrics(self) -> Metrics:
        """The counters."""

    @property
    @abstractmethod
    def load(self) -> Load:
        """How busy the service is."""

    @property
    @abstractmethod
    def most_tokens(self) -> int | None:
        """Maximum number of tokens of a request; None: unlimited."""

    @abstractmethod
    def warm_up(self, report: Callable[[int, int], None]) -> None:
        """Compile programs, before the start. `report` is called with the number of programs done, and of all."""

    @abstractmethod
    def start(self) -> None:
        """Begin to serve."""

    @abstractmethod
    def close(self) -> None:
        """End what runs."""

    @abstractmethod
    def endpoints(self) -> dict[str, Handler]:
        """Return the handlers of POST requests by path."""

    @property
    def page_mode(self) -> Literal["chat", "text"] | None:
        """Kind of the page for a browser; None: there is no page."""
        return None

    def application(self) -> Starlette:
        """Return the application."""
        page = [Route("/", self._counted(self._page, is_open=True), methods=["GET"])]
        routes = [
            *(page if self.page_mode else []),
            Route("/health", self._counted(self._health, is_open=True), methods=["GET"]),
            Route("/metrics", self._counted(self._metrics), methods=["GET"]),
            Route("/v1/models", self._counted(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._counted(self._one_model), methods=["GET"]),
        ]
        routes += [Route(path, self._counted(handler), methods=["POST"]) for path, handler in self.endpoints().items()]

        async def http_error(request: HTTPRequest, error: HTTPException) -> Response:
            return APIError(error.status_code, str(error.detail)).response()

        async def fault(request: HTTPRequest, error: Exception) -> Response:
            return APIError(500, "internal error; see the log of the server.").response()

        return Starlette(routes=routes, exception_handlers={HTTPException: http_error, Exception: fault})

    def check_model(self, name: object) -> None:
        """Raise APIError if a client requests a different model."""
        if name != self.name:
            message = f"the model {str(name)[:80]!r} does not exist. This server has the model {self.name!r}."
            raise APIError(404, message, "model", "model_not_found")

    def _counted(self, handler: Handler, is_open: bool = False) -> Handler:
        """Return the handler with checks of host and key, errors as answers, and a counter."""

        async def handle(request: HTTPRequest) -> Response:
            try:
                self._check_host(request)
                if not is_open:
                    self._check_key(request)
                response = await handler(request)
            except APIError as error:
                response = error.response()
            path = request.scope["route"].path  # the pattern: the path itself is chosen by the client
            self.metrics.answers[path, response.status_code] += 1
            return response

        return handle

    def _check_host(self, request: HTTPRequest) -> None:
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self.local_only and name.lower() not in LOCAL_HOSTS:
            raise APIError(403, "this server answers requests for the loopback address only, such as 127.0.0.1.")

    def _check_key(self, request: HTTPRequest) -> None:
        if self.api_key is None:
            return
        given = request.headers.get("authorization", "")
        kind, _, key = given.partition(" ")
        # In constant time, so that the time of an answer says nothing about the key.
        right = hmac.compare_digest(key.strip().encode("utf-8", "replace"), self.api_key.encode())
        if kind.lower() != "bearer" or not right:
            raise APIError(401, "the API key is missing or wrong.", code="invalid_api_key")

    async def _page(self, request: HTTPRequest) -> Response:
        return page_response(self.page_mode)

    async def _health(self, request: HTTPRequest) -> Response:
        failure = self.failure
        return json_response({"status": "ok" if failure is None else "failed"}, 200 if failure is None else 503)

    async def _metrics(self, request: HTTPRequest) -> Response:
        return PlainTextResponse(self.metrics.text(**vars(self.load)), media_type="text/plain; version=0.0.4")

    async def _models(self, request: HTTPRequest) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: HTTPRequest) -> Response:
        self.check_model(request.path_params["name"])
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "transformer-zoo"}
        return card | ({} if self.most_tokens is None else {"max_model_len": self.most_tokens})


class Workers:
    """Threads for the work of calls, so that others are answered meanwhile.

    Args:
        name: name of the threads.
        threads: number of threads.
        waiting: maximum number of calls that wait for a thread.
        full: message to a call for which there is no room.
    """

    def __init__(self, name: str, threads: int, waiting: int, full: str):
        self.threads, self._full = ThreadPoolExecutor(threads, name), full
        self._calls, self._most = 0, threads + waiting

    def close(self) -> None:
        """Cancel the calls that wait."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, request: HTTPRequest, work: Callable[..., Result], *arguments: object) -> Result:
        """Return the result of the work; if the client leaves before its end, cancel it.

        Raise APIError if too many calls wait, the server ends, or the client has left. Errors of the work are raised
        unchanged.
        """
        if self._calls >= self._most:
            raise APIError(429, f"{self._full}. Try again later.", code="queue_full")
        try:
            future = asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)
        except RuntimeError:  # `close` was called
            raise APIError(503, "the server is shutting down.") from None
        self._calls += 1
        try:
            return await until_gone(request, future)
        finally:
            self._calls -= 1


def unknown_field(name: str, known: Iterable[str]) -> APIError:
    """Return the error for a field that a body must not have."""
    return APIError(400, f"unknown field {name[:80]!r}.{nearest(name[:80], known)}", name[:80])


async def until_gone(request: HTTPRequest, work: Awaitable[Result]) -> Result:
    """Return the result of the work; if the client leaves before its end, cancel it.

    Raises:
        APIError: the client has disconnected. Errors of the work are raised unchanged.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "the client has left.")
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
