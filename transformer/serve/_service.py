"""The HTTP interface as an application of starlette."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from transformer.chat._prompts import ChatPrompts
from transformer.config._checks import ConfigError
from transformer.generate._rows import MOST_ENDS
from transformer.generate._sampling import Sampling
from transformer.serve._answers import Answer
from transformer.serve._bodies import (
    MOST_CHOICES,
    Body,
    check_fields,
    read_json,
    sampling_of,
    template_switches,
    text_prompts,
    tools_of,
)
from transformer.serve._constraints import Constraints
from transformer.serve._engine import Engine, EngineClosedError, QueueFullError
from transformer.serve._errors import APIError, json_response
from transformer.serve._requests import Delta, Request, Ticket

Handler = Callable[[HTTPRequest], Awaitable[Response]]
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""names under which a browser reaches the loopback address"""


@dataclass
class Service:
    """A model behind the HTTP interface."""

    engine: Engine
    name: str
    """name of the model, which clients send as `model`"""
    sampling: Sampling
    """sampling of requests that say nothing"""
    eos_ids: tuple[int, ...]
    """tokens that end a text"""
    chat: ChatPrompts | None
    """None: the model has no chat template"""
    suppress: tuple[int, ...] = ()
    api_key: str | None = None
    local_only: bool = True
    """refuse requests for other hosts than the loopback address, which a page in a browser could make"""
    created: int = field(default_factory=lambda: int(time.time()))
    _encoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self):
        self._constraints = Constraints(self.engine.tokenizer, self.engine.vocab_size)

    def application(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/health", self._counted(self._health, is_open=True), methods=["GET"]),
            Route("/metrics", self._counted(self._metrics), methods=["GET"]),
            Route("/v1/models", self._counted(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._counted(self._one_model), methods=["GET"]),
            Route("/v1/chat/completions", self._counted(self._chat_completion), methods=["POST"]),
            Route("/v1/completions", self._counted(self._text_completion), methods=["POST"]),
        ]

        async def http_error(request: HTTPRequest, error: HTTPException) -> Response:
            return APIError(error.status_code, str(error.detail)).response()

        async def fault(request: HTTPRequest, error: Exception) -> Response:
            return APIError(500, "internal error; the log of the server says more.").response()

        return Starlette(routes=routes, exception_handlers={HTTPException: http_error, Exception: fault})

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
            self.engine.metrics.answers[path, response.status_code] += 1
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

    async def _health(self, request: HTTPRequest) -> Response:
        failure = self.engine.failure
        return json_response({"status": "ok" if failure is None else "failed"}, 200 if failure is None else 503)

    async def _metrics(self, request: HTTPRequest) -> Response:
        engine = self.engine
        sizes = {"slots": engine.slots, "pages": engine.pages}
        text = engine.metrics.text(running=engine.running, waiting=engine.waiting, **sizes)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _models(self, request: HTTPRequest) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: HTTPRequest) -> Response:
        self._check_model(request.path_params["name"])
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "transformer-zoo"}
        return card | {"max_model_len": self.engine.positions}

    def _check_model(self, name: Any) -> None:
        if name != self.name:
            message = f"the model {str(name)[:80]!r} does not exist. This server has the model {self.name!r}."
            raise APIError(404, message, "model", "model_not_found")

    async def _chat_completion(self, request: HTTPRequest) -> Response:
        values = await read_json(request)
        self._check_model(values.get("model", self.name))
        body = check_fields(values, is_chat=True)
        if self.chat is None:
            raise APIError(400, "this model has no chat template. Use /v1/completions.", "messages")
        sampling = sampling_of(values, self.sampling, self.suppress)
        switches, tools = template_switches(values), tools_of(values)
        chat = self.chat

        def encode() -> list[int]:
            found = chat.encode(values.get("messages"), tools=tools, add_generation_prompt=True, **switches)
            return list(found.ids)

        return await self._answer(request, body, sampling, [await self._encoded(encode, "messages")], is_chat=True)

    async def _text_completion(self, request: HTTPRequest) -> Response:
        values = await read_json(request)
        self._check_model(values.get("model", self.name))
        body = check_fields(values, is_chat=False)
        given = text_prompts(values)
        if len(given) * body.n > MOST_CHOICES:
            raise APIError(400, f"a call can have at most {MOST_CHOICES} texts: prompts times n.", "prompt")
        sampling = sampling_of(values, self.sampling, self.suppress)
        encode = self.engine.tokenizer.encode_source
        prompts = [
            await self._encoded(lambda text=one: list(encode(text)), "prompt") if isinstance(one, str) else one
            for one in given
        ]
        return await self._answer(request, body, sampling, prompts, is_chat=False)

    async def _encoded(self, encode: Callable[[], list[int]], param: str) -> list[int]:
        """Return token ids. A long text takes a while: in another thread, one at a time, so that others are served."""
        try:
            async with self._encoding:
                ids = await run_in_threadpool(encode)
        except (ValueError, TypeError) as error:
            raise APIError(400, str(error)[:500], param) from None
        if not ids:
            raise APIError(400, f"{param} must have at least one token.", param)
        return ids

    async def _answer(
        self, request: HTTPRequest, body: Body, sampling: Sampling, prompts: list[list[int]], *, is_chat: bool
    ) -> Response:
        constraints = await self._constraints.make(body.form, len(prompts) * body.n)
        requests = [
            Request(
                prompt=prompt,
                max_tokens=self._limit(body, prompt, is_chat),
                sampling=sampling,
                seed=(body.seed + choice) % 2**32,
                eos_ids=self._ends(body),
                stop=body.stop,
                top=body.top or 0,
                is_reply=is_chat,
                constraint=constraints[number * body.n + choice],
            )
            for number, prompt in enumerate(prompts)
            for choice in range(body.n)
        ]
        arrived: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(number: int, delta: Delta) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, (number, delta))

        tickets = self._submit(requests, deliver)
        sizes = [len(prompt) for prompt in prompts]
        answer = Answer(self.name, self.engine.tokenizer, is_chat=is_chat, prompts=sizes, n=body.n, top=body.top)
        parts = _parts(answer, arrived, tickets)
        if body.stream:
            return _Stream(_events(answer, parts, body.include_usage), tickets)
        await _until_gone(request, _drain(parts))
        return json_response(answer.whole())

    def _submit(self, requests: list[Request], deliver: Callable[[int, Delta], None]) -> list[Ticket]:
        try:
            return self.engine.submit(requests, deliver)
        except QueueFullError as error:
            raise APIError(429, f"{error}. Try again later.", code="queue_full") from None
        except EngineClosedError as error:
            raise APIError(503, f"{error}.") from None
        except (ConfigError, ValueError) as error:
            raise APIError(400, str(error)[:500]) from None

    def _limit(self, body: Body, prompt: list[int], is_chat: bool) -> int:
        """Return the maximum number of new tokens: what is left for a reply, and 16 for a text, as in OpenAI's."""
        left = self.engine.positions - len(prompt)
        if left < 1:
            message = f"the prompt has {len(prompt)} tokens, but a request can have at most {self.engine.positions}"
            raise APIError(400, f"{message}, prompt and answer together. Shorten it.", code="context_length_exceeded")
        if body.max_tokens is None:
            return left if is_chat else min(16, left)
        return min(body.max_tokens, left)

    def _ends(self, body: Body) -> tuple[int, ...]:
        ends = tuple(dict.fromkeys((*self.eos_ids, *body.stop_ids)))
        if any(type(one) is not int for one in body.stop_ids) or len(ends) > MOST_ENDS:
            room = MOST_ENDS - len(self.eos_ids)
            raise APIError(400, f"stop_token_ids must be at most {room} token ids.", "stop_token_ids")
        return ends


class _Stream(StreamingResponse):
    """Server-sent events; at their end, also if the client leaves before the first one, the requests are cancelled."""

    def __init__(self, events: AsyncIterator[str], tickets: list[Ticket]):
        super().__init__(events, headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
        self._tickets = tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for ticket in self._tickets:
                ticket.cancel()


async def _parts(
    answer: Answer, arrived: asyncio.Queue[tuple[int, Delta]], tickets: list[Ticket]
) -> AsyncIterator[tuple[int, Delta]]:
    """Yield the parts of all texts as they arrive; if the reader leaves, cancel the requests."""
    try:
        open_texts = len(tickets)
        while open_texts:
            number, delta = await arrived.get()
            if delta.error is not None:
                raise APIError(500, f"{delta.error}.")
            if delta.finish == "cancelled":
                raise APIError(503, "the server is shutting down.")
            answer.choices[number].add(delta)
            open_texts -= delta.finish is not None
            yield number, delta
    finally:
        for ticket in tickets:
            ticket.cancel()


async def _events(answer: Answer, parts: AsyncIterator[tuple[int, Delta]], include_usage: bool) -> AsyncIterator[str]:
    """Yield the server-sent events of a stream."""
    async with contextlib.aclosing(parts):
        try:
            for chunk in answer.beginning():
                yield _event(chunk)
            async for number, delta in parts:
                yield _event(answer.part(number, delta))
            if include_usage:
                yield _event(answer.usage_part())
        except APIError as error:
            yield _event(error.values)
            return
        yield "data: [DONE]\n\n"


def _event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"


async def _drain(parts: AsyncIterator[tuple[int, Delta]]) -> None:
    async with contextlib.aclosing(parts):
        async for _ in parts:
            pass


async def _until_gone(request: HTTPRequest, work: Awaitable[None]) -> None:
    """Wait for the work; if the client leaves before its end, cancel it.

    Raises:
        APIError: the client has left; nobody reads this answer. Errors of the work are raised unchanged.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "the client has left.")
        task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
