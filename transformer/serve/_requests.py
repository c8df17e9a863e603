"""Requests to the engine and their results, and the text of one answer while its tokens arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformer.chat._channels import Channels
from transformer.chat._pieces import Detokenizer, StopStrings
from transformer.data.tokenizers._base import Tokenizer
from transformer.generate._constraints import Constraint
from transformer.generate._sampling import PLAIN, Sampling

Finish = Literal["stop", "length", "cancelled", "error"]
"""why an answer ended: an end token or a stop string, the maximum number of tokens, the client, or an error"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to generate."""

    prompt: Sequence[int]
    """token ids, at least one"""
    max_tokens: int
    """maximum number of new tokens"""
    sampling: Sampling = PLAIN
    """how tokens are sampled"""
    seed: int = 0
    """random seed, from 0 to 2^32 - 1"""
    eos_ids: tuple[int, ...] = ()
    """ids that end the text, at most `MOST_ENDS`, with those of the constraint"""
    stop: tuple[str, ...] = ()
    """strings that end the text, which does not contain them"""
    top: int = 0
    """number of alternatives of each token whose log-probabilities are delivered"""
    is_reply: bool = False
    """the prompt is a conversation: reasoning in another channel is separated from the answer"""
    constraint: Constraint | None = None
    """tokens that the text may consist of, at its beginning; the request uses it up. None: all tokens"""

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end the text, with those of the constraint."""
        return tuple(dict.fromkeys((*self.eos_ids, *(self.constraint.end_ids if self.constraint else ()))))


@dataclass(frozen=True)
class Token:
    """A generated token."""

    id: int
    """token id"""
    log_probability: float
    """under the model, before penalties, temperature and filters"""
    top: list[tuple[int, float]]
    """the most probable tokens with their log-probabilities, as many as the request wants"""


@dataclass(frozen=True)
class Delta:
    """The next part of an answer."""

    text: str
    """text that the tokens so far complete, without stop strings"""
    tokens: list[Token]
    """new tokens; their text can follow in a later part"""
    reasoning: str = ""
    """text that the model wrote in a different channel from the answer"""
    finish: Finish | None = None
    """None: more follows"""
    error: str | None = None
    """what failed; None: nothing"""


class Ticket:
    """A request in the engine. `cancel` may be called from any thread, and more than once."""

    def __init__(self, request: Request, deliver: Callable[[Delta], None], text: AnswerText):
        self.request, self.deliver, self.text = request, deliver, text
        self.submitted = time.perf_counter()
        self.first: float | None = None
        """time of the first token"""
        self.number = 0
        """number of the request in the order of arrival"""
        self.tokens: list[int] = []
        """generated tokens"""
        self.computed = 0
        """number of tokens that were computed since the request got its slot: fewer than `tokens` after a preemption"""
        self._cancelled = threading.Event()

    @property
    def known(self) -> list[int]:
        """Next tokens to compute that were generated before a preemption."""
        return self.tokens[self.computed :]

    def send(self, delta: Delta) -> None:
        """Pass a part of the answer to the client; if it has disconnected, cancel the request."""
        try:
            self.deliver(delta)
        except RuntimeError:  # the event loop of the client is closed
            self.cancel()

    def cancel(self) -> None:
        """End the answer. Its slot becomes free before the next decoding step."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()


@dataclass
class AnswerText:
    """Turns the tokens of one answer into text, and ends it before a stop string."""

    tokenizer: Tokenizer
    request: Request
    _stops: StopStrings = field(init=False)
    _decoder: Channels | Detokenizer = field(init=False)
    _reasoned: int = 0

    def __post_init__(self):
        self._stops = StopStrings(self.request.stop)
        is_reply = self.request.is_reply
        self._decoder = Channels(self.tokenizer) if is_reply else Detokenizer(self.tokenizer, self.request.prompt)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.stopped

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        return self._stops.add(self._decoder.add(ids))

    def finish(self) -> str:
        """Return the text that was held back; it can contain a stop string, before which it ends."""
        if self.stopped:
            return ""
        return self._stops.add(self._decoder.finish()) + self._stops.finish()

    def reasoning(self) -> str:
        """Return the reasoning since the last call."""
        whole = self._decoder.reasoning if isinstance(self._decoder, Channels) else ""
        new, self._reasoned = whole[self._reasoned :], len(whole)
        return new
