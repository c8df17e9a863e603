"""A service whose model computes in one thread: calls that wait are computed together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HTTPRequest

from transformer.serve._errors import APIError
from transformer.serve._http import HTTPService, Load, until_gone
from transformer.serve._metrics import Metrics


@dataclass(frozen=True)
class Job:
    """What a call computes. Inputs of calls with an equal `key` are computed together."""

    key: Hashable
    inputs: Callable[[], Sequence[Any]]
    """returns the inputs, such as the token ids of each text; its errors are errors of this call only"""
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    """returns the result of each input"""
    size: Callable[[Any], int]
    """size of an input, such as its number of tokens"""
    most: int
    """maximum size of all inputs of a group; a single call may exceed it"""


@dataclass(eq=False)
class _Call:
    """A call that waits, or is computed."""

    job: Job
    future: Future = field(default_factory=Future)
    inputs: Sequence[Any] | None = None


@dataclass(kw_only=True)
class ThreadService(HTTPService):
    """Computes one group of calls at a time; other calls wait. The first one of them begins the next group."""

    queue: int = 64
    """maximum number of calls that wait"""
    counters: Metrics = field(default_factory=Metrics)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "model"))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _calls: int = 0
    _waiting: list[_Call] = field(default_factory=list)
    closing: bool = False
    """the server ends: a long call should end early"""

    @property
    def metrics(self) -> Metrics:
        """The counters."""
        return self.counters

    @property
    def load(self) -> Load:
        """How busy the thread is. The calls of a group but one count as waiting."""
        return Load(running=min(self._calls, 1), waiting=max(self._calls - 1, 0), slots=1)

    def start(self) -> None:
        """Nothing: the thread starts with the first call."""

    def close(self) -> None:
        """Cancel the calls that wait."""
        self.closing = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        for call in self._in_line():
            call.future.cancel()

    async def compute(self, request: HTTPRequest, job: Job) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return inputs and results of a job, which is computed in the thread, unless the client leaves before that.

        Raise APIError if too many calls wait, the server ends, or the client has left. Errors of the job are raised
        unchanged.
        """
        call = _Call(job)
        with self._lock:
            if self._calls > self.queue:
                message = f"{self._calls - 1} requests wait already; the queue holds {self.queue}. Try again later."
                raise APIError(429, message, code="queue_full")
            self._calls += 1
            self._waiting.append(call)
        call.future.add_done_callback(lambda _: self._end(call))
        began = time.perf_counter()
        try:
            self._thread.submit(self._run)  # one run per call, so none is left; a run without a call does nothing
        except RuntimeError:  # `close` was called
            call.future.cancel()
            raise APIError(503, "the server is shutting down.") from None
        try:
            results = await until_gone(request, asyncio.wrap_future(call.future))
        except asyncio.CancelledError:
            if self.closing and call.future.cancelled():
                raise APIError(503, "the server is shutting down.") from None
            raise
        self.counters.duration.add(time.perf_counter() - began)
        return call.inputs, results

    def _end(self, call: _Call) -> None:
        with self._lock:
            self._calls -= 1
        self._leave(call)

    def _leave(self, call: _Call) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(call)

    def _in_line(self) -> list[_Call]:
        with self._lock:
            return list(self._waiting)

    def _run(self) -> None:
        """Compute the next group, in the thread."""
        if group := self._take():
            _compute(group)

    def _take(self) -> list[_Call]:
        """Remove the next group from the calls that wait: the first one, and those after it that fit."""
        group: list[_Call] = []
        total = 0
        for call in self._in_line():
            if group and call.job.key != group[0].job.key:
                continue
            if not _read_inputs(call):
                continue
            size = sum(map(call.job.size, call.inputs))
            if group and total + size > call.job.most:
                break
            self._leave(call)
            if call.future.set_running_or_notify_cancel():
                group.append(call)
                total += size
        return group


def _read_inputs(call: _Call) -> bool:
    """Read the inputs of a call once; return whether it can be computed. An error ends the call."""
    if call.inputs is None and not call.future.cancelled():
        try:
            call.inputs = call.job.inputs()
        except Exception as error:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)
    return call.inputs is not None


def _compute(group: Sequence[_Call]) -> None:
    """Compute the calls of a group together. After an error, compute each alone, so that others get their results."""
    try:
        results = group[0].job.compute([one for call in group for one in call.inputs])
    except Exception as error:
        if len(group) == 1:
            group[0].future.set_exception(error)
            return
        for call in group:
            _compute([call])
        return
    start = 0
    for call in group:
        end = start + len(call.inputs)
        call.future.set_result(results[start:end])
        start = end
