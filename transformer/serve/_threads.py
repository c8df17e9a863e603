"""A service whose model computes one call at a time, in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from starlette.requests import Request as HTTPRequest

from transformer.serve._errors import APIError
from transformer.serve._http import HTTPService, Load, Result, until_gone
from transformer.serve._metrics import Metrics


@dataclass(kw_only=True)
class ThreadService(HTTPService):
    """Computes one call at a time; others wait, first in, first out."""

    queue: int = 64
    """maximum number of calls that wait"""
    counters: Metrics = field(default_factory=Metrics)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "model"))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _calls: int = 0
    closing: bool = False
    """the server ends: a long call should end early"""

    @property
    def metrics(self) -> Metrics:
        """The counters."""
        return self.counters

    @property
    def load(self) -> Load:
        """How busy the thread is."""
        return Load(running=min(self._calls, 1), waiting=max(self._calls - 1, 0), slots=1)

    def start(self) -> None:
        """Nothing: the thread starts with the first call."""

    def close(self) -> None:
        """Cancel the calls that wait."""
        self.closing = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def compute(self, request: HTTPRequest, function: Callable[[], Result]) -> Result:
        """Return the result of a function, which is called in the thread, unless the client leaves before that.

        Raises:
            APIError: too many calls wait, the server ends, or the client has left. Errors of the function are raised
                unchanged.
        """
        with self._lock:
            if self._calls > self.queue:
                message = f"{self._calls - 1} requests wait already; the queue holds {self.queue}. Try again later."
                raise APIError(429, message, code="queue_full")
            self._calls += 1
        began = time.perf_counter()
        try:
            future = self._thread.submit(function)
        except RuntimeError:  # `close` was called
            self._end(None)
            raise APIError(503, "the server is shutting down.") from None
        future.add_done_callback(self._end)
        result = await until_gone(request, asyncio.wrap_future(future))
        self.counters.duration.add(time.perf_counter() - began)
        return result

    def _end(self, future: Future | None) -> None:
        with self._lock:
            self._calls -= 1
