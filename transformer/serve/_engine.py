"""The engine: a thread that generates the texts of many requests together, in a fixed number of slots."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import Tokenizer
from transformer.generate._generation import check_draft
from transformer.generate._layers import Params
from transformer.generate._lookup import PromptLookup
from transformer.generate._prompts import check_rows, check_text_model, decoding_model
from transformer.generate._rows import MOST_ENDS, MOST_STEPS, MOST_TOP, RowSampling
from transformer.generate._speculative import Draft
from transformer.nn.models._causal_lm import CausalLM
from transformer.serve._lockstep import PING, STOP
from transformer.serve._requests import AnswerText, Delta, Request, Ticket
from transformer.serve._scheduler import Scheduler
from transformer.serve._slots import PAGE_SIZE, Slots

PING_SECONDS = 5.0
"""maximum time between two calls of the devices, if several processes make them"""


class QueueFullError(RuntimeError):
    """The queue has no room for these requests: try again later."""


class EngineClosedError(RuntimeError):
    """The engine accepts no requests: it is shutting down, or it has failed."""


class Engine:
    """Generates the texts of many requests together.

    Requests wait in a queue, first in, first out. The prompt of the first one is read in parts of at most `chunk`
    tokens between decoding steps of the others, into the slot that it then decodes in. Keys and values are stored in
    pages of one pool. A request starts as soon as a slot and the pages of its prompt are free, and its text gets more
    pages while it grows. If there are none, the youngest request returns its pages and its slot to the others, and is
    computed again later with the same tokens. Prompts with the same beginning share its pages; pages that nobody uses
    keep their contents until others need them, those that were used last for the longest time.

    The text of a request depends only on the request: greedy decoding gives the tokens, and sampling with a seed the
    text, that the same request gives alone.

    Args:
        model: a `CausalLM`.
        params: its parameters, without the outer "params".
        tokenizer: its tokenizer.
        slots: number of texts that are generated at a time.
        positions: maximum number of tokens of a request, prompt and answer together.
        cache_tokens: number of tokens of all requests together whose keys and values fit into the pool, rounded up to
            pages of 16 tokens; None: `slots` times `positions`, so that no request is computed again.
        queue: maximum number of requests that wait.
        suppress: token ids that are never generated.
        draft: speculative decoding: a draft model, or a lookup in the text of each request. Texts without a constraint
            then generate 1 to `draft.tokens` + 1 tokens per step. It does not change the text, up to rounding.
        mesh: a mesh of `nn.make_mesh` over whose axes `tensor` and `expert` the parameters are sharded, and over
            `tensor` the heads of keys and values; None: the default device. It changes no text, up to rounding.

    Raises:
        ConfigError: a size is out of range, the mesh does not fit the model, or `positions` exceeds the position table
            of the model or of the draft.
        ValueError: the model is not a `CausalLM`, or the draft does not fit it.
    """

    def __init__(
        self,
        model: CausalLM,
        params: Params,
        tokenizer: Tokenizer,
        *,
        slots: int = 8,
        positions: int = 2048,
        cache_tokens: int | None = None,
        queue: int = 64,
        suppress: Sequence[int] = (),
        draft: Draft | PromptLookup | None = None,
        mesh: Mesh | None = None,
    ):
        self.vocab_size = check_text_model("a server", model, params)
        if not isinstance(model, CausalLM):
            raise ValueError(f"a server needs a causal model, got a {type(model).__name__}. Pass another model.")
        if model.config.has_linear_attention:
            raise ValueError(
                "a server shares the beginnings of texts between requests, which the state of linear attention does "
                "not allow. Pass a model without linear attention, or use transformer.generate."
            )
        if cache_tokens is None:
            cache_tokens = slots * -(-positions // PAGE_SIZE) * PAGE_SIZE
        _check_sizes(model, slots, positions, cache_tokens, queue)
        if draft is not None:
            _check_draft(model, self.vocab_size, draft, positions)
        self.slots, self.positions, self.queue_size, self.tokenizer = slots, positions, queue, tokenizer
        num_pages = -(-cache_tokens // PAGE_SIZE)
        sizes = {"slots": slots, "positions": positions, "num_pages": num_pages}
        suppressed = np.array(sorted(set(suppress)), np.int32)
        self._device = Slots(decoding_model(model), params, **sizes, suppressed=suppressed, draft=draft, mesh=mesh)
        self.chunk = self._device.chunk
        self._changed = threading.Condition()
        self._scheduler = Scheduler(self._device, model.config, suppressed, self._changed)
        self.metrics = self._scheduler.metrics
        self._closing, self._submitted = False, 0
        self.failure: str | None = None
        """why the engine has failed; None: it has not"""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def warm_up(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile all programs, before the start. `report` is called with the number of programs done, and of all."""
        total = len(self._device.widths) + 2
        for number, width in enumerate(self._device.widths):
            self._device.read(0, [0] * width, 0)
            report(number + 1, total)
        self._device.start(0, Request(prompt=[0], max_tokens=1))
        report(total - 1, total)
        self._scheduler.call_advance(1, False)  # no slot has a ticket, so no row is kept
        report(total, total)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, requests: Sequence[Request], deliver: Callable[[int, Delta], None]) -> list[Ticket]:
        """Append requests to the queue: all of them, or none.

        Args:
            requests: the texts to generate.
            deliver: called in the thread of the engine with the number of a request and the next part of its answer;
                it must return immediately.

        Raises:
            ValueError: a request is invalid.
            QueueFullError: the queue has no room.
            EngineClosedError: the engine accepts no requests.
        """
        for request in requests:
            self._check(request)
        tickets = [
            Ticket(request, lambda delta, number=number: deliver(number, delta), AnswerText(self.tokenizer, request))
            for number, request in enumerate(requests)
        ]
        with self._changed:
            if self._closing or self.failure is not None:
                raise EngineClosedError("the server is shutting down" if self._closing else "the server has failed")
            if self.waiting + len(tickets) > self.queue_size + self.slots - self.running:
                raise QueueFullError(f"{self.waiting} requests wait already; the queue holds {self.queue_size}")
            for ticket in tickets:
                self._submitted += 1
                ticket.number = self._submitted
            self._scheduler.queue.extend(tickets)
            self._changed.notify_all()
        return tickets

    def close(self, seconds: float = 0.0) -> None:
        """Accept no more requests, finish those that were accepted within `seconds`, and cancel the rest."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._scheduler.has_work, max(0.0, deadline - time.monotonic()))
            for ticket in self._scheduler.tickets():
                ticket.cancel()
        if self._thread.is_alive():
            self._thread.join()
        self._device.lockstep.send(STOP)  # the other processes end

    def follow(self) -> None:
        """Compute the part of this process until process 0 closes its engine, in the other processes of a server."""
        self._device.follow()

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._scheduler.queue)

    @property
    def running(self) -> int:
        """Number of requests that are read or generated."""
        return self._scheduler.running

    @property
    def pages(self) -> int:
        """Number of pages of the pool."""
        return self._device.pages.num_pages

    def _check(self, request: Request) -> None:
        check_rows("prompt", [request.prompt], self.vocab_size)
        RowSampling.of(request.sampling, self.vocab_size, top=False)
        if request.max_tokens < 1 or len(request.prompt) + request.max_tokens > self.positions:
            raise ConfigError(
                f"a request can have at most {self.positions} tokens, got {len(request.prompt)} of the prompt and "
                f"{request.max_tokens} to generate. Shorten the prompt, or request fewer tokens."
            )
        if len(request.ends) > MOST_ENDS or any(not 0 <= i < self.vocab_size for i in request.ends):
            raise ConfigError(
                f"end tokens must be at most {MOST_ENDS} ids from 0 to {self.vocab_size - 1}, got {request.ends}."
            )
        if request.constraint is not None and request.constraint.vocab_size != self.vocab_size:
            raise ConfigError(
                f"the constraint is for {request.constraint.vocab_size} token ids, but the model has "
                f"{self.vocab_size}. Create it with the vocab_size of the model."
            )
        if not 0 <= request.top <= MOST_TOP:
            raise ConfigError(f"top must be from 0 to {MOST_TOP}, got {request.top}.")

    def _run(self) -> None:
        """Serve requests until the engine is closed and has no work."""
        scheduler, pages = self._scheduler, self._device.pages
        try:
            while True:
                with self._changed:
                    self._changed.notify_all()  # for `close`
                    # Other processes wait for the next call in a collective operation, which times out.
                    pause = PING_SECONDS if self._device.lockstep.is_shared else None
                    self._changed.wait_for(lambda: scheduler.has_work or self._closing, pause)
                    if not scheduler.has_work and self._closing:
                        return
                    scheduler.take_next()
                if not scheduler.has_work:
                    self._device.lockstep.send(PING)
                scheduler.read_parts()
                scheduler.generate()
                self.metrics.pages_used = pages.num_pages - pages.num_free
        except Exception as error:
            traceback.print_exc()
            self._fail(type(error).__name__)

    def _fail(self, reason: str) -> None:
        """Answer all requests with an error: the state on the device may be lost."""
        with self._changed:
            self.failure = reason
            tickets = self._scheduler.clear()
            self._changed.notify_all()
        for ticket in tickets:
            ticket.send(Delta("", [], finish="error", error="the server has failed"))


FEWEST_POSITIONS = 16
"""smallest number of tokens of a request that an engine can be made for"""


def _check_draft(model: CausalLM, vocab_size: int, draft: Draft | PromptLookup, positions: int) -> None:
    """Raise an error if what proposes tokens does not fit the engine."""
    check_draft(model, vocab_size, draft, [], 0)
    if draft.tokens >= MOST_STEPS:
        raise ConfigError(f"a server can propose at most {MOST_STEPS - 1} tokens per step, got {draft.tokens}.")
    if isinstance(draft, PromptLookup):
        return
    config = draft.model.config
    if config.max_length is not None and positions > config.max_length:
        raise ConfigError(
            f"the draft's learned position table has {config.max_length} positions, got {positions} tokens per "
            f"request. Request at most {config.max_length}, or use another draft."
        )


def _check_sizes(model: CausalLM, slots: int, positions: int, cache_tokens: int, queue: int) -> None:
    """Raise ConfigError for sizes that the engine can't have."""
    for name, value, least in (("slots", slots, 1), ("positions", positions, FEWEST_POSITIONS), ("queue", queue, 0)):
        if type(value) is not int or value < least:
            raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")
    if type(cache_tokens) is not int or cache_tokens < positions:
        raise ConfigError(
            f"cache_tokens must be at least {positions}, the number of tokens of one request, got {cache_tokens!r}. "
            "Pass a larger number."
        )
    longest = model.config.max_length
    if longest is not None and positions > longest:
        raise ConfigError(
            f"the model's learned position table has {longest} positions, got {positions} tokens per request. Request "
            f"at most {longest}."
        )
