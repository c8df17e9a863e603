"""The scheduler of the engine: which requests have slots and pages, whose prompts are read, and what is generated."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer.config._model import TransformerConfig
from transformer.generate._constraints import Constraint, next_allowed
from transformer.generate._prompts import warn_if_rescaled
from transformer.generate._row_steps import Steps
from transformer.generate._rows import MOST_STEPS, RowMasks
from transformer.generate._streaming import SECONDS
from transformer.serve._metrics import Metrics
from transformer.serve._requests import AnswerText, Delta, Finish, Ticket, Token
from transformer.serve._slots import Slots


@dataclass
class _Reading:
    """The prompt that is being read."""

    ticket: Ticket
    slot: int
    done: int
    """number of tokens in the cache"""


class Scheduler:
    """Gives slots and pages to the requests of a queue, and makes the calls of the devices for them.

    Its methods run in the thread of the engine. Other threads may use the queue while they hold `changed`, which
    `take_next` needs too. The ids `suppressed` (S,) are never generated.
    """

    def __init__(self, device: Slots, config: TransformerConfig, suppressed: np.ndarray, changed: threading.Condition):
        self.queue: collections.deque[Ticket] = collections.deque()
        self.active: dict[int, Ticket] = {}
        """texts that are generated, by slot"""
        self.reading: _Reading | None = None
        self.metrics = Metrics()
        self._device, self._pages, self._config = device, device.pages, config
        self._suppressed, self._changed = suppressed, changed
        self._num_slots = len(device.pages.table)
        self._steps = 1
        self._waits: tuple[Ticket, int] | None = None  # the first request, and the free pages, which were too few

    @property
    def running(self) -> int:
        """Number of requests that are read or generated."""
        return len(self.active) + (self.reading is not None)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.queue or self.running)

    def tickets(self) -> list[Ticket]:
        """Return the requests that wait or run."""
        reading = [] if self.reading is None else [self.reading.ticket]
        return [*self.active.values(), *reading, *self.queue]

    def clear(self) -> list[Ticket]:
        """Drop all requests, and return them."""
        tickets = self.tickets()
        self.active, self.reading = {}, None
        self.queue.clear()
        return tickets

    def take_next(self) -> None:
        """Begin to read the first prompt of the queue, if a slot and enough pages are free."""
        for ticket in [ticket for ticket in self.queue if ticket.cancelled]:  # they make room for others at once
            self.queue.remove(ticket)
            self._finish(ticket, "cancelled")
        free = [slot for slot in range(self._num_slots) if slot not in self.active]
        if not self.queue or not free or self.reading is not None:
            return
        ticket = self.queue[0]
        if (ticket, self._pages.num_free) == self._waits:  # nothing has changed since the last attempt
            return
        # Each running text may soon need a page more: without them, a new one would be preempted at once.
        prompt, size = ticket.request.prompt, len(ticket.request.prompt) + len(ticket.tokens) + 1
        done = self._pages.admit(free[0], prompt, size, spare=len(self.active))
        if done is None:
            self._waits = ticket, self._pages.num_free
            return
        self.queue.popleft()
        self._waits = None
        self.metrics.shared_tokens += done
        self.reading = _Reading(ticket, free[0], done)

    def read_parts(self) -> None:
        """Read parts of one or several prompts, together at most `chunk` tokens, for which running texts wait."""
        left = self._device.chunk
        while self.reading is not None:
            left -= min(self._device.chunk, len(self.reading.ticket.request.prompt) - self.reading.done)
            if left < 0:
                return
            self._read_part()
            if self.reading is None:
                with self._changed:
                    self.take_next()

    def _read_part(self) -> None:
        """Read the next part of the prompt; after the last one, start the row in its slot."""
        reading = self.reading
        slot, ticket = reading.slot, reading.ticket
        if ticket.cancelled:
            self.reading = None
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
        self.active[slot] = ticket
        self.reading = None

    def _make_room(self, steps: int) -> int:
        """Give all texts pages for `steps` more steps, or one, after preempting others; return this number of steps."""
        for count in (steps, 1):
            needed = {slot: self._most_tokens(slot, count) for slot in self.active}
            if sum(self._pages.missing(slot, size) for slot, size in needed.items()) <= self._pages.num_free:
                break
        for slot in sorted(self.active, key=lambda slot: self.active[slot].number):  # the oldest first
            while slot in self.active and self._pages.missing(slot, needed[slot]) > self._pages.num_free:
                self._preempt_youngest()
            if slot in self.active:
                self._pages.grow(slot, needed[slot])
        return count

    def _most_tokens(self, slot: int, steps: int) -> int:
        """Return the number of tokens in the pages of a slot during this many steps; its last token is not stored."""
        ticket = self.active[slot]
        tokens = min(steps * self._device.width, MOST_STEPS)  # `advance` ends when its output is full
        new = min(ticket.computed + tokens, ticket.request.max_tokens - 1)
        return len(ticket.request.prompt) + new

    def _preempt_youngest(self) -> None:
        """Take slot and pages from the request that came last, which is computed again later."""
        running = [(ticket.number, slot, ticket) for slot, ticket in self.active.items()]
        if (reading := self.reading) is not None:
            running.append((reading.ticket.number, reading.slot, reading.ticket))
            self._pages.share(reading.slot, reading.ticket.request.prompt, reading.done)
        _, slot, ticket = max(running, key=lambda one: one[0])
        self._pages.release(slot)
        ticket.computed = 0
        self.metrics.preemptions += 1
        with self._changed:  # before the others: they came later
            if self.active.pop(slot, None) is None:
                self.reading = None
            self.queue.appendleft(ticket)

    def call_advance(self, steps: int, until_free: bool, masks: RowMasks | None = None) -> Steps:
        """Call `Slots.advance` for the texts in slots."""
        keep = np.array([slot in self.active for slot in range(self._num_slots)])
        known = {slot: ticket.known for slot, ticket in self.active.items() if ticket.known}
        return self._device.advance(keep, known, masks, steps, until_free)

    def generate(self) -> None:
        """Generate a few tokens in all slots, and deliver them."""
        if not self.active:
            return
        for slot in [slot for slot, ticket in self.active.items() if ticket.cancelled]:
            self._end(slot, "cancelled")
        # A request that waits for pages can start only when a text has ended, which ends the call.
        starts = bool(self.queue) and len(self.active) < self._num_slots and self._waits is None
        waits = self.reading is not None or starts
        steps = 1 if waits else self._steps
        for ticket in self.active.values():  # what a constraint allows is known for one new token
            steps = min(steps, max(1, len(ticket.known))) if ticket.request.constraint else steps
        steps = self._make_room(steps)
        masks = self._masks()
        started = time.perf_counter()
        out = self.call_advance(steps, bool(self.queue), masks)
        now = time.perf_counter()
        if count := int(out.steps.max()):
            each = max((now - started) / count, 1e-6)
            self._steps = max(1, min(MOST_STEPS, round(SECONDS / each), 2 * self._steps))
            self.metrics.steps += count
            self.metrics.proposed_tokens += int(out.proposed.sum())
            self.metrics.accepted_tokens += int(out.accepted.sum())
        for slot in list(self.active):
            self._take(slot, out, now)

    def _masks(self) -> RowMasks | None:
        """Return what constraints allow after known tokens, and end the texts that can't be continued."""
        tickets = {slot: one for slot, one in self.active.items() if one.request.constraint and not one.known}
        if not tickets:
            return None
        masks = RowMasks.blank(self._num_slots, self._config.vocab_size)
        for slot, ticket in tickets.items():
            try:
                masks.allowed[slot] = next_allowed(ticket.request.constraint, self._suppressed)
                masks.constrained[slot] = True
            except ValueError as error:
                self._end(slot, "error", error=str(error))
        return masks

    def _take(self, slot: int, out: Steps, now: float) -> None:
        """Deliver the new tokens of one slot; if its answer has ended, free the slot."""
        ticket, count = self.active[slot], int(out.counts[slot])
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
                ticket.send(Delta(text, tokens, ticket.text.reasoning()))
            return
        # The keys of a text that has failed may be NaN.
        self._end(slot, finish, text, tokens, error, forget=bool(out.failed[slot]))

    def _end(self, slot: int, *answer: Any, forget: bool = False, **error: Any) -> None:
        """End the text of a slot with the arguments of `_finish`, and free the slot."""
        self._pages.release(slot, forget=forget)
        self._finish(self.active.pop(slot), *answer, **error)

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
        ticket.send(Delta(text, list(tokens), ticket.text.reasoning(), finish, error))


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
