"""The engine: a thread that generates the texts of many requests together, in a fixed number of slots."""

from __future__ import annotations

import collections
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from transformer.config._checks import ConfigError
from transformer.data._tokenizer import Tokenizer
from transformer.generate._generation import row_keys
from transformer.generate._layers import copy_unstacked, unstacked_model
from transformer.generate._prompts import check_rows, check_text_model, decoding_model
from transformer.generate._rows import (
    MOST_ENDS,
    MOST_STEPS,
    MOST_TOP,
    NewRow,
    RowSampling,
    Steps,
    advance,
    blank_rows,
    put_in,
    read_widths,
    take_out,
)
from transformer.generate._streaming import SECONDS, read_tokens
from transformer.nn.models._causal_lm import CausalLM
from transformer.serve._metrics import Metrics
from transformer.serve._requests import AnswerText, Delta, Finish, Request, Ticket, Token


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

    Requests wait in a queue, first in, first out. The prompt of the first one is read in parts of at most `CHUNK`
    tokens between decoding steps of the others, into the slot that it then decodes in. The beginning of a prompt is
    not read again if it equals that of the last prompt of a slot.

    The text of a request depends only on the request: greedy decoding gives the tokens, and sampling with a seed the
    text, that the same request gives alone.

    Args:
        model: a `CausalLM`.
        params: its parameters, without the outer "params".
        tokenizer: its tokenizer.
        slots: number of texts that are generated at a time.
        positions: maximum number of tokens of a request, prompt and answer together.
        queue: maximum number of requests that wait.
        suppress: token ids that are never generated.

    Raises:
        ConfigError: a size is out of range, or `positions` exceeds the position table of the model.
        ValueError: the model is not a `CausalLM`.
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        tokenizer: Tokenizer,
        *,
        slots: int = 8,
        positions: int = 2048,
        queue: int = 64,
        suppress: Sequence[int] = (),
    ):
        self.vocab_size = check_text_model("a server", model, params)
        if not isinstance(model, CausalLM):
            raise ValueError(f"a server needs a causal model, got a {type(model).__name__}. Pass another model.")
        _check_sizes(model, slots, positions, queue)
        self.slots, self.positions, self.queue_size, self.tokenizer = slots, positions, queue, tokenizer
        model = decoding_model(model)
        self._params = {**params, "decoder": copy_unstacked(model, params["decoder"])}
        self._model = unstacked_model(model)
        self._suppressed = np.array(sorted(set(suppress)), np.int32)
        self._rows = blank_rows(self._model, slots, positions)
        self._widths = read_widths(positions)
        self.chunk = self._widths[-1]
        self._read_cache = self._model.init_cache(1, positions)
        self._read_prompt = np.zeros((0,), np.int32)  # tokens in _read_cache
        self._prompts = [self._read_prompt] * slots  # the last prompt of each slot, whose keys are in its cache
        self._uses, self._used = 0, [0] * slots  # number of requests so far, and that of the last one in each slot
        self._active: dict[int, Ticket] = {}
        self._reading: _Reading | None = None
        self._queue: collections.deque[Ticket] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._steps = 1
        self.failure: str | None = None
        """why the engine has failed; None: it has not"""
        self.metrics = Metrics()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def warm_up(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile all programs, before the start. `report` is called with the number of programs done, and of all."""
        total, zero = len(self._widths) + 3, np.int32(0)
        for number, width in enumerate(self._widths):
            tokens, one = np.zeros((1, width), np.int32), np.array([1], np.int32)
            given = tokens, np.array([0], np.int32), one, self._read_cache
            logits, self._read_cache = read_tokens(self._model, self._params, *given)
            report(number + 1, total)
        self._read_cache = take_out(self._rows, zero)
        report(total - 2, total)
        row = self._new_row(Request(prompt=[0], max_tokens=1))
        self._rows = put_in(self._rows, zero, row, logits, self._read_cache)
        report(total - 1, total)
        self._call_advance(1, False)  # no slot has a ticket, so no row is kept
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

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of requests that are read or generated."""
        return len(self._active) + (self._reading is not None)

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
        if len(request.eos_ids) > MOST_ENDS or any(not 0 <= i < self.vocab_size for i in request.eos_ids):
            raise ConfigError(
                f"end tokens must be at most {MOST_ENDS} ids from 0 to {self.vocab_size - 1}, got {request.eos_ids}."
            )
        if not 0 <= request.top <= MOST_TOP:
            raise ConfigError(f"top must be from 0 to {MOST_TOP}, got {request.top}.")

    def _run(self) -> None:
        """Serve requests until the engine is closed and has no work."""
        try:
            while True:
                with self._changed:
                    self._changed.notify_all()  # for `close`
                    self._changed.wait_for(lambda: self._has_work() or self._closing)
                    if not self._has_work():
                        return
                    self._take_next()
                if self._reading is not None:
                    self._read_part()
                if self._active:
                    self._generate()
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
        """Begin to read the first prompt of the queue, if a slot is free."""
        for ticket in [ticket for ticket in self._queue if ticket.cancelled]:  # they make room for others at once
            self._queue.remove(ticket)
            self._finish(ticket, "cancelled")
        free = [slot for slot in range(self.slots) if slot not in self._active]
        if not self._queue or not free or self._reading is not None:
            return
        ticket = self._queue.popleft()
        prompt = np.asarray(ticket.request.prompt, np.int32)
        # The slot whose prompt shares least with this one is overwritten, of several the least recently used one: the
        # others stay to be shared.
        slot = min(free, key=lambda number: (self._shared(self._prompts[number], prompt), self._used[number]))
        self._uses += 1
        self._used[slot] = self._uses
        self._reading = _Reading(ticket, slot, self._load_prefix(prompt))

    def _shared(self, known: np.ndarray, prompt: np.ndarray) -> int:
        """Return how many tokens of the prompt need not be read if those of `known` are in a cache.

        Whole chunks only: they were read by the same calls of the same program, so the result is the same bit by bit.
        The last token of the prompt is read again, for its logits.
        """
        size = min(len(known), len(prompt) - 1)
        differing = np.flatnonzero(known[:size] != prompt[:size])
        same = int(differing[0]) if differing.size else size
        return same // self.chunk * self.chunk

    def _load_prefix(self, prompt: np.ndarray) -> int:
        """Load the longest known beginning of a prompt into the cache for reading, and return its length."""
        found = [self._shared(known, prompt) for known in self._prompts]
        best, same = int(np.argmax(found)), self._shared(self._read_prompt, prompt)
        if found[best] > same:
            self._read_cache, same = take_out(self._rows, np.int32(best)), found[best]
        self._read_prompt = prompt[:same]
        self.metrics.shared_tokens += same
        return same

    def _read_part(self) -> None:
        """Read the next part of the prompt; after the last one, start the row in its slot."""
        reading = self._reading
        if reading.ticket.cancelled:
            self._reading = None
            self._finish(reading.ticket, "cancelled")
            return
        prompt = np.asarray(reading.ticket.request.prompt, np.int32)
        part = prompt[reading.done : reading.done + self.chunk]
        width = next(width for width in self._widths if width >= len(part))
        # Padding repeats the last token, so that a row reads only its own entries of the embedding table.
        tokens = np.pad(part, (0, width - len(part)), mode="edge")[None]
        before, count = np.array([[reading.done], [len(part)]], np.int32)
        logits, self._read_cache = read_tokens(self._model, self._params, tokens, before, count, self._read_cache)
        reading.done += len(part)
        self._read_prompt = prompt[: reading.done]
        self.metrics.prompt_tokens += len(part)
        if reading.done < len(prompt):
            return
        row = self._new_row(reading.ticket.request)
        self._rows = put_in(self._rows, np.int32(reading.slot), row, logits, self._read_cache)
        self._prompts[reading.slot] = prompt
        self._active[reading.slot] = reading.ticket
        self._reading = None

    def _new_row(self, request: Request) -> NewRow:
        ends = [*request.eos_ids, *[-1] * (MOST_ENDS - len(request.eos_ids))]
        in_prompt = np.zeros((self.vocab_size,), bool)
        in_prompt[np.asarray(request.prompt)] = True
        return NewRow(
            left=np.int32(request.max_tokens),
            key=row_keys(np.array([request.seed], np.uint32), np.zeros(1, int))[0],  # as `generate` with one prompt
            ends=np.array(ends, np.int32),
            sampling=RowSampling.of(request.sampling, self.vocab_size, top=request.top > 0),
            in_prompt=in_prompt,
        )

    def _call_advance(self, steps: int, until_free: bool) -> Steps:
        keep = np.array([slot in self._active for slot in range(self.slots)])
        given = self._rows, keep, self._suppressed, np.int32(steps), np.bool_(until_free)
        self._rows, out = advance(self._model, self._params, *given)
        return jax.device_get(out)

    def _generate(self) -> None:
        """Generate a few tokens in all slots, and deliver them."""
        for slot in [slot for slot, ticket in self._active.items() if ticket.cancelled]:
            self._finish(self._active.pop(slot), "cancelled")
        started = time.perf_counter()
        waits = self._reading is not None or (bool(self._queue) and len(self._active) < self.slots)
        out = self._call_advance(1 if waits else self._steps, bool(self._queue))
        now = time.perf_counter()
        if out.steps:
            each = max((now - started) / int(out.steps), 1e-6)
            self._steps = max(1, min(MOST_STEPS, round(SECONDS / each), 2 * self._steps))
            self.metrics.steps += int(out.steps)
        for slot in list(self._active):
            self._take(slot, out, now)

    def _take(self, slot: int, out: Steps, now: float) -> None:
        """Deliver the new tokens of one slot; if its answer has ended, free the slot."""
        ticket, count = self._active[slot], int(out.counts[slot])
        wanted = ticket.request.top
        tokens = [
            Token(
                int(out.tokens[slot, i]),
                float(out.log_probabilities[slot, i]),
                list(zip(out.top_tokens[slot, i, :wanted].tolist(), _floats(out, slot, i, wanted), strict=True)),
            )
            for i in range(count)
        ]
        ticket.count += count
        self.metrics.generated_tokens += count
        if count and ticket.first is None:
            ticket.first = now
            self.metrics.first_token.add(now - ticket.submitted)
        text = ticket.text.add([token.id for token in tokens])
        finish: Finish | None = None
        if out.failed[slot]:
            self._prompts[slot] = self._prompts[slot][:0]  # its keys may be NaN
            finish = "error"
        elif ticket.text.stopped or out.ended[slot]:
            finish = "stop"
        elif ticket.count >= ticket.request.max_tokens:
            finish = "length"
        if finish is None:
            if text or tokens:
                self._deliver(ticket, Delta(text, tokens, ticket.text.reasoning()))
            return
        del self._active[slot]
        self._finish(ticket, finish, text, tokens)

    def _finish(self, ticket: Ticket, finish: Finish, text: str = "", tokens: Sequence[Token] = ()) -> None:
        if finish in ("stop", "length"):
            text += ticket.text.finish()
            finish = "stop" if ticket.text.stopped else finish
        error = "the model computed values that are not finite" if finish == "error" else None
        self.metrics.finished[finish] += 1
        self.metrics.duration.add(time.perf_counter() - ticket.submitted)
        self._deliver(ticket, Delta(text, list(tokens), ticket.text.reasoning(), finish, error))

    def _deliver(self, ticket: Ticket, delta: Delta) -> None:
        """Pass a part of an answer to the client; if nobody is there any more, cancel the request."""
        try:
            ticket.deliver(delta)
        except RuntimeError:  # the event loop of the client is closed
            ticket.cancel()


def _floats(out: Steps, slot: int, index: int, wanted: int) -> list[float]:
    return out.top_log_probabilities[slot, index, :wanted].tolist()


FEWEST_POSITIONS = 16
"""smallest number of tokens of a request that an engine can be made for"""


def _check_sizes(model: CausalLM, slots: int, positions: int, queue: int) -> None:
    """Raise ConfigError for sizes that the engine can't have."""
    for name, value, least in (("slots", slots, 1), ("positions", positions, FEWEST_POSITIONS), ("queue", queue, 0)):
        if type(value) is not int or value < least:
            raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")
    longest = model.config.max_length
    if model.config.position == "learned" and positions > longest:
        raise ConfigError(
            f"the model's learned position table has {longest} positions, got {positions} tokens per request. Request "
            f"at most {longest}."
        )
