"""Chat and text completions of a causal model over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from transformer.chat._prompts import ChatPrompts
from transformer.config._checks import ConfigError
from transformer.data.tokenizers._long_texts import TooManyTokensError, check_length
from transformer.generate._rows import MOST_ENDS
from transformer.generate._sampling import Sampling
from transformer.serve._answers import Answer
from transformer.serve._attention import AnswerAttention
from transformer.serve._bodies import (
    MOST_CHOICES,
    Body,
    check_fields,
    prompt_options,
    read_json,
    sampling_of,
    template_switches,
    text_prompts,
    tools_of,
)
from transformer.serve._constraints import Constraints
from transformer.serve._engine import Engine, EngineClosedError, QueueFullError
from transformer.serve._errors import APIError, json_response
from transformer.serve._http import Handler, HTTPService, Load, Workers, until_gone
from transformer.serve._metrics import Metrics
from transformer.serve._requests import Delta, Request, Ticket


@dataclass(kw_only=True)
class Service(HTTPService):
    """A causal model behind the HTTP interface: chat and text completions."""

    engine: Engine
    sampling: Sampling
    """sampling of requests that say nothing"""
    eos_ids: tuple[int, ...]
    """tokens that end a text"""
    chat: ChatPrompts | None
    """None: the model has no chat template"""
    suppress: tuple[int, ...] = ()
    attention: AnswerAttention | None = None
    """attention of answers; None: the server does not show it"""

    def __post_init__(self):
        queue = self.engine.queue_size
        self._constraints = Constraints(self.engine.tokenizer, self.engine.vocab_size, queue)
        self._encoder = Workers("encoder", 1, queue, f"{queue} calls wait until their texts are encoded")

    @property
    def failure(self) -> str | None:
        """Why the engine has failed; None: it has not."""
        return self.engine.failure

    @property
    def metrics(self) -> Metrics:
        """The counters of the engine."""
        return self.engine.metrics

    @property
    def load(self) -> Load:
        """How many texts are generated, and how many wait."""
        return Load(self.engine.running, self.engine.waiting, self.engine.slots, self.engine.pages)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a request, prompt and answer together."""
        return self.engine.positions

    def warm_up(self, report: Callable[[int, int], None]) -> None:
        """Compile the programs of the engine."""
        self.engine.warm_up(report)

    def start(self) -> None:
        """Start the engine."""
        self.engine.start()

    def close(self) -> None:
        """Cancel what runs, and end the engine."""
        self.engine.close()
        self._encoder.close()
        self._constraints.close()
        if self.attention is not None:
            self.attention.close()

    @property
    def page_mode(self) -> Literal["chat", "text"]:
        """A conversation, if the model has a chat template."""
        return "chat" if self.chat else "text"

    def endpoints(self) -> dict[str, Handler]:
        """Return the handlers of chat and text completions, and of the attention of an answer."""
        found = {"/v1/chat/completions": self._chat_completion, "/v1/completions": self._text_completion}
        return found | ({"/v1/attention": self._attention} if self.attention is not None else {})

    async def _attention(self, request: HTTPRequest) -> Response:
        return await self.attention.answer(request, lambda name: self.check_model(name or self.name))

    async def _chat_completion(self, request: HTTPRequest) -> Response:
        values = await read_json(request)
        self.check_model(values.get("model", self.name))
        body = check_fields(values, is_chat=True)
        if self.chat is None:
            raise APIError(400, "this model has no chat template. Use /v1/completions.", "messages")
        sampling = sampling_of(values, self.sampling, self.suppress)
        switches, tools = template_switches(values), tools_of(values)
        chat = self.chat

        def encode() -> list[list[int]]:
            found = chat.encode(values.get("messages"), tools=tools, add_generation_prompt=True, **switches)
            return [list(found.ids)]

        prompts = await self._encoded(request, encode, "messages")
        return await self._answer(request, body, sampling, prompts, is_chat=True)

    async def _text_completion(self, request: HTTPRequest) -> Response:
        values = await read_json(request)
        self.check_model(values.get("model", self.name))
        body = check_fields(values, is_chat=False)
        given = text_prompts(values)
        if len(given) * body.n > MOST_CHOICES:
            raise APIError(400, f"a call can have at most {MOST_CHOICES} texts: prompts times n.", "prompt")
        sampling = sampling_of(values, self.sampling, self.suppress)
        tokenizer, longest = self.engine.tokenizer, self.engine.positions
        options = prompt_options(values)

        def encode() -> list[list[int]]:
            for one in given:
                check_length(tokenizer, [one], longest)
            return [list(tokenizer.encode_prompt(one, **options)) for one in given]

        prompts = await self._encoded(request, encode, "prompt") if isinstance(given[0], str) else given
        return await self._answer(request, body, sampling, prompts, is_chat=False)

    async def _encoded(
        self, request: HTTPRequest, encode: Callable[[], list[list[int]]], param: str
    ) -> list[list[int]]:
        """Return token ids. A long text takes a while: in another thread, one at a time, so that others are served."""
        try:
            prompts = await self._encoder.run(request, encode)
        except TooManyTokensError as error:
            raise APIError(400, f"{param}: {error}", param, "context_length_exceeded") from None
        except (ValueError, TypeError) as error:
            raise APIError(400, str(error)[:500], param) from None
        if not all(prompts):
            raise APIError(400, f"{param} must have at least one token.", param)
        return prompts

    async def _answer(
        self, request: HTTPRequest, body: Body, sampling: Sampling, prompts: list[list[int]], *, is_chat: bool
    ) -> Response:
        constraints = await self._constraints.make(request, body.form, len(prompts) * body.n)
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
        continued = {"contexts": () if is_chat else prompts}
        answer = Answer(
            self.name, self.engine.tokenizer, is_chat=is_chat, prompts=sizes, n=body.n, top=body.top, **continued
        )
        parts = _parts(answer, arrived, tickets)
        if body.stream:
            return _Stream(_events(answer, parts, body.include_usage), tickets)
        await until_gone(request, _drain(parts))
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
    """Server-sent events; at their end, even if the client leaves before the first one, the requests are cancelled."""

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
