"""The engine: a thread that generates the texts of many requests together, in a fixed number of slots."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from transformer.config._checks import ConfigError
from transformer.data._tokenizer import Tokenizer
from transformer.generate._constraints import Constraint
from transformer.generate._generation import check_draft
from transformer.generate._lookup import PromptLookup
from transformer.generate._prompts import check_rows, check_text_model, decoding_model, warn_if_rescaled
from transformer.generate._row_steps import Steps
from transformer.generate._rows import MOST_ENDS, MOST_STEPS, MOST_TOP, RowMasks, RowSampling
from transformer.generate._speculative import Draft
from transformer.generate._streaming import SECONDS
from transformer.nn.models._causal_lm import CausalLM
from transformer.serve._masks import SlotMasks
from transformer.serve._metrics import Metrics
from transformer.serve._requests import AnswerText, Delta, Finish, Request, Ticket, Token
from transformer.serve._slots import PAGE_SIZE, Slots

PING_SECONDS = 5.0
"""maximum time between two calls of the devices, if several processes make them"""


class QueueFullError(RuntimeError):
    """The queue has no room for these requests: try again later."""


class EngineClosedError(RuntimeError):
    """The engine accepts no requests: it is shutting down, or it has failed."""


@dataclass
class _Reading:
    """The prompt that is being read."""

    ticket: Ticket
    slot: int
    done: int
    """number of tokens in the cache"""


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
        model: Any,
        params: Any,
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
            draft = _checked_draft(model, self.vocab_size, draft, positions)
        self.slots, self.positions, self.queue_size, self.tokenizer = slots, positions, queue, tokenizer
        self._config = model.config
        num_pages = -(-cache_tokens // PAGE_SIZE)
        sizes = {"slots": slots, "positions": positions, "num_pages": num_pages}
        suppressed = np.array(sorted(set(suppress)), np.int32)
        self._device = Slots(decoding_model(model), params, **sizes, suppressed=suppressed, draft=draft, mesh=mesh)
        self._pages, self.chunk = self._device.pages, self._device.chunk
        self._masks = SlotMasks(slots, self.vocab_size, suppressed)
        self._active: dict[int, Ticket] = {}
        self._reading: _Reading | None = None
        self._queue: collections.deque[Ticket] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._steps, self._submitted = 1, 0
        self._waits: tuple[Ticket, int] | None = None  # the first request, and the free pages, which were too few
        self.failure: str | None = None
        """why the engine has failed; None: it has not"""
        self.metrics = Metrics()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def warm_up(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile all programs, before the start. `report` is called with the number of programs done, and of all."""
        total = len(self._device.widths) + 2
        for number, width in enumerate(self._device.widths):
            self._device.read(0, [0] * width, 0)
            report(number + 1, total)
        self._device.start(0, Request(prompt=[0], max_tokens=1))
        report(total - 1, total)
        self._call_advance(1, False, self._masks.of({})[0])  # no slot has a ticket, so no row is kept
        report(total, total)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, requests: Sequence[Request], deliver: Callable[[int, Delta], None]) -> list[Ticket]:
        """Append requests to the queue: all of them, or none.

        Args:
            requests: the texts to generate.
            deliver: called in the thread of the engine with the number of a request and the next part of its answer;
                it must return at once.

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
            if len(self._queue) + len(tickets) > self.queue_size + self._free_slots():
                raise QueueFullError(f"{len(self._queue)} requests wait already; the queue holds {self.queue_size}")
            for ticket in tickets:
                self._submitted += 1
                ticket.number = self._submitted
            self._queue.extend(tickets)
            self._changed.notify_all()
        return tickets

    def close(self, seconds: float = 0.0) -> None:
        """Accept no more requests, finish those that were accepted within `seconds`, and cancel the rest."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._has_work(), max(0.0, deadline - time.monotonic()))
            for ticket in self._tickets():
                ticket.cancel()
        if self._thread.is_alive():
            self._thread.join()
        self._device.stop()

    def follow(self) -> None:
        """Compute the part of this process until process 0 closes its engine, in the other processes of a server."""
        self._device.follow()

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of requests that are read or generated."""
        return len(self._active) + (self._reading is not None)

    @property
    def pages(self) -> int:
        """Number of pages of the pool."""
        return self._pages.num_pages

    def _free_slots(self) -> int:
        return self.slots - self.running

    def _tickets(self) -> list[Ticket]:
        reading = [] if self._reading is None else [self._reading.ticket]
        return [*self._active.values(), *reading, *self._queue]

    def _has_work(self) -> bool:
        return bool(self._active or self._queue or self._reading)

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
        try:
            while True:
                with self._changed:
                    self._changed.notify_all()  # for `close`
                    # Other processes wait for the next call in a collective operation, which times out.
                    pause = PING_SECONDS if self._device.is_shared else None
                    self._changed.wait_for(lambda: self._has_work() or self._closing, pause)
                    if not self._has_work() and self._closing:
                        return
                    self._take_next()
                if not self._has_work():
                    self._device.ping()
                self._read_parts()
                if self._active:
                    self._generate()
                self.metrics.pages_used = self._pages.num_pages - self._pages.num_free
        except Exception as error:
            traceback.print_exc()
            self._fail(type(error).__name__)

    def _fail(self, reason: str) -> None:
        """Answer all requests with an error: the state on the device may be lost."""
        with self._changed:
            self.failure = reason
            tickets = self._tickets()
            self._active, self._reading = {}, None
            self._queue.clear()
            self._changed.notify_all()
        for ticket in tickets:
            self._deliver(ticket, Delta("", [], finish="error", error="the server has failed"))

    def _take_next(self) -> None:
        """Begin to read the first prompt of the queue, if a slot and enough pages are free."""
        for ticket in [ticket for ticket in self._queue if ticket.cancelled]:  # they make room for others at once
            self._queue.remove(ticket)
            self._finish(ticket, "cancelled")
        free = [slot for slot in range(self.slots) if slot not in self._active]
        if not self._queue or not free or self._reading is not None:
            return
        ticket = self._queue[0]
        if (ticket, self._pages.num_free) == self._waits:  # nothing has changed since the last attempt
            return
        # Each running text may soon need a page more: without them, a new one would be preempted at once.
        prompt, size = ticket.request.prompt, len(ticket.request.prompt) + len(ticket.tokens) + 1
        done = self._pages.admit(free[0], prompt, size, spare=len(self._active))
        if done is None:
            self._waits = ticket, self._pages.num_free
            return
        self._queue.popleft()
        self._waits = None
        self.metrics.shared_tokens += done
        self._reading = _Reading(ticket, free[0], done)

    def _read_parts(self) -> None:
        """Read parts of one or several prompts, together at most `chunk` tokens, for which running texts wait."""
        left = self._device.chunk
        while self._reading is not None:
            left -= min(self._device.chunk, len(self._reading.ticket.request.prompt) - self._reading.done)
            if left < 0:
                return
            self._read_part()
            if self._reading is None:
                with self._changed:
                    self._take_next()

    def _read_part(self) -> None:
        """Read the next part of the prompt; after the last one, start the row in its slot."""
        reading = self._reading
        slot, ticket = reading.slot, reading.ticket
        if ticket.cancelled:
            self._reading = None
            self._pages.release(slot)
            self._finish(ticket, "cancelled")
            return
        prompt = ticket.request.prompt
        count = self._device.read(slot, prompt, reading.done)
        reading.done += count
        self.metrics.prompt_tokens += count
        if reading.done < len(prompt):
            return
        self._pages.share(slot, prompt, len(prompt))
        self._device.start(slot, ticket.request)
        self._active[slot] = ticket
        self._reading = None

    def _make_room(self, steps: int) -> int:
        """Give all texts the pages for `steps` more steps; if there are too few, for one, after preempting others.

        Returns:
            The number of steps for which there are pages.
        """
        for count in (steps, 1):
            needed = {slot: self._most_tokens(slot, count) for slot in self._active}
            if sum(self._pages.missing(slot, size) for slot, size in needed.items()) <= self._pages.num_free:
                break
        for slot in sorted(self._active, key=lambda slot: self._active[slot].number):  # the oldest first
            while slot in self._active and self._pages.missing(slot, needed[slot]) > self._pages.num_free:
                self._preempt_youngest()
            if slot in self._active:
                self._pages.grow(slot, needed[slot])
        return count

    def _most_tokens(self, slot: int, steps: int) -> int:
        """Return the number of tokens in the pages of a slot during so many steps; its last token is not stored."""
        ticket = self._active[slot]
        tokens = min(steps * self._device.width, MOST_STEPS)  # `advance` ends when its output is full
        new = min(ticket.computed + tokens, ticket.request.max_tokens - 1)
        return len(ticket.request.prompt) + new

    def _preempt_youngest(self) -> None:
        """Take slot and pages from the request that came last, which is computed again later."""
        running = [(ticket.number, slot, ticket) for slot, ticket in self._active.items()]
        if (reading := self._reading) is not None:
            running.append((reading.ticket.number, reading.slot, reading.ticket))
            self._pages.share(reading.slot, reading.ticket.request.prompt, reading.done)
        _, slot, ticket = max(running, key=lambda one: one[0])
        self._pages.release(slot)
        ticket.computed = 0
        self.metrics.preemptions += 1
        with self._changed:  # before the others: they came later
            if self._active.pop(slot, None) is None:
                self._reading = None
            self._queue.appendleft(ticket)

    def _call_advance(self, steps: int, until_free: bool, masks: RowMasks) -> Steps:
        keep = np.array([slot in self._active for slot in range(self.slots)])
        known = {slot: ticket.known for slot, ticket in self._active.items() if ticket.known}
        return self._device.advance(keep, known, masks, steps, until_free)

    def _generate(self) -> None:
        """Generate a few tokens in all slots, and deliver them."""
        for slot in [slot for slot, ticket in self._active.items() if ticket.cancelled]:
            self._end(slot, "cancelled")
        # A request that waits for pages can start only when a text has ended, which ends the call.
        starts = bool(self._queue) and len(self._active) < self.slots and self._waits is None
        waits = self._reading is not None or starts
        steps = 1 if waits else self._steps
        for ticket in self._active.values():  # what a constraint allows is known for one new token
            steps = min(steps, max(1, len(ticket.known))) if ticket.request.constraint else steps
        steps = self._make_room(steps)
        constraints = {
            slot: ticket.request.constraint
            for slot, ticket in self._active.items()
            if ticket.request.constraint and not ticket.known
        }
        masks, failed = self._masks.of(constraints)
        for slot, reason in failed.items():
            self._end(slot, "error", error=reason)
        started = time.perf_counter()
        out = self._call_advance(steps, bool(self._queue), masks)
        now = time.perf_counter()
        if count := int(out.steps.max()):
            each = max((now - started) / count, 1e-6)
            self._steps = max(1, min(MOST_STEPS, round(SECONDS / each), 2 * self._steps))
            self.metrics.steps += count
            self.metrics.proposed_tokens += int(out.proposed.sum())
            self.metrics.accepted_tokens += int(out.accepted.sum())
        for slot in list(self._active):
            self._take(slot, out, now)

    def _take(self, slot: int, out: Steps, now: float) -> None:
        """Deliver the new tokens of one slot; if its answer has ended, free the slot."""
        ticket, count = self._active[slot], int(out.counts[slot])
        wanted, again = ticket.request.top, min(count, len(ticket.known))
        tokens = [
            Token(
                int(out.tokens[slot, i]),
                float(out.log_probabilities[slot, i]),
                list(zip(out.top_tokens[slot, i, :wanted].tolist(), _floats(out, slot, i, wanted), strict=True)),
            )
            for i in range(again, count)
        ]
        ticket.computed += count
        text, tokens = _until_stop(ticket.text, tokens)
        ticket.tokens += [token.id for token in tokens]
        size = len(ticket.request.prompt)
        warn_if_rescaled(self._config, size, size + len(ticket.tokens) - 1)  # the last token is not read yet
        self.metrics.generated_tokens += len(tokens)
        self.metrics.recomputed_tokens += again
        if tokens and ticket.first is None:
            ticket.first = now
            self.metrics.first_token.add(now - ticket.submitted)
        finish: Finish | None = None
        error = _accept(ticket.request.constraint, tokens)
        if error is not None or out.failed[slot]:
            finish = "error"
        elif ticket.text.stopped or out.ended[slot]:
            finish = "stop"
        elif len(ticket.tokens) >= ticket.request.max_tokens:
            finish = "length"
        if finish is None:
            if text or tokens:
                self._deliver(ticket, Delta(text, tokens, ticket.text.reasoning()))
            return
        # The keys of a text that has failed may be NaN.
        self._end(slot, finish, text, tokens, error, forget=bool(out.failed[slot]))

    def _end(self, slot: int, *answer: Any, forget: bool = False, **error: Any) -> None:
        """End the text of a slot with the arguments of `_finish`, and free the slot."""
        self._pages.release(slot, forget=forget)
        self._finish(self._active.pop(slot), *answer, **error)

    def _finish(
        self, ticket: Ticket, finish: Finish, text: str = "", tokens: Sequence[Token] = (), error: str | None = None
    ) -> None:
        if finish in ("stop", "length"):
            text += ticket.text.finish()
            finish = "stop" if ticket.text.stopped else finish
        if finish == "error" and error is None:
            error = "the model computed values that are not finite"
        self.metrics.finished[finish] += 1
        self.metrics.duration.add(time.perf_counter() - ticket.submitted)
        self._deliver(ticket, Delta(text, list(tokens), ticket.text.reasoning(), finish, error))

    def _deliver(self, ticket: Ticket, delta: Delta) -> None:
        """Pass a part of an answer to the client; if nobody is there any more, cancel the request."""
        try:
            ticket.deliver(delta)
        except RuntimeError:  # the event loop of the client is closed
            ticket.cancel()


def _until_stop(text: AnswerText, tokens: Sequence[Token]) -> tuple[str, list[Token]]:
    """Append tokens to a text, and return the text that they complete and the tokens up to a stop string."""
    new = ""
    for i, token in enumerate(tokens):
        new += text.add([token.id])
        if text.stopped:  # how many tokens the same call has computed after it must not be seen
            return new, list(tokens[: i + 1])
    return new, list(tokens)


def _accept(constraint: Constraint | None, tokens: Sequence[Token]) -> str | None:
    """Append tokens to the text of a constraint, and return why it can't be continued; None: it can."""
    try:
        for token in tokens if constraint is not None else ():
            constraint.accept(token.id)
    except ValueError as error:  # the text has become too complex
        return str(error)
    return None


def _floats(out: Steps, slot: int, index: int, wanted: int) -> list[float]:
    return out.top_log_probabilities[slot, index, :wanted].tolist()


FEWEST_POSITIONS = 16
"""smallest number of tokens of a request that an engine can be made for"""


def _checked_draft(
    model: CausalLM, vocab_size: int, draft: Draft | PromptLookup, positions: int
) -> Draft | PromptLookup:
    """Return what proposes tokens, prepared for decoding; raise an error if it does not fit the engine."""
    check_draft(model, vocab_size, draft, [], 0)
    if draft.tokens >= MOST_STEPS:
        raise ConfigError(f"a server can propose at most {MOST_STEPS - 1} tokens per step, got {draft.tokens}.")
    if isinstance(draft, PromptLookup):
        return draft
    config = draft.model.config
    if config.position == "learned" and positions > config.max_length:
        raise ConfigError(
            f"the draft's learned position table has {config.max_length} positions, got {positions} tokens per "
            f"request. Request at most {config.max_length}, or use another draft."
        )
    return dataclasses.replace(draft, model=decoding_model(draft.model))


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
    if model.config.position == "learned" and positions > longest:
        raise ConfigError(
            f"the model's learned position table has {longest} positions, got {positions} tokens per request. Request "
            f"at most {longest}."
        )
