"""Slots whose next token is a hash of what their pages contain: the engine's bookkeeping without a compiled program."""

import hashlib

import numpy as np

from transformer.generate._constraints import packed
from transformer.generate._row_steps import Steps
from transformer.generate._rows import MOST_STEPS, MOST_TOP
from transformer.serve._lockstep import Lockstep
from transformer.serve._slots import PAGE_SIZE, SlotPages

CHUNK = 2 * PAGE_SIZE
FIRST_ID, LAST_ID = 5, 280
"""ids that are generated"""


def next_token(text, seed):
    """Return the token after a text, which depends on all its tokens."""
    digest = hashlib.sha256(np.array([seed, *text], np.int64).tobytes()).digest()
    return FIRST_ID + int.from_bytes(digest[:4], "little") % (LAST_ID - FIRST_ID)


def among(ids, text, seed):
    """Return the token after a text if only some ids are allowed."""
    return int(ids[next_token(text, seed) % len(ids)])


def log_probability(text, token):
    return -len(text) - token / 1024


def most_probable(text, count):
    """Return the alternatives of the token after a text; their log-probabilities depend on the position too."""
    return [((7 * len(text) + i) % LAST_ID, -len(text) - i / 64) for i in range(count)]


def text_of(request):
    """Return the tokens of a request alone, and why they end."""
    tokens = []
    while len(tokens) < request.max_tokens:
        token = next_token([*request.prompt, *tokens], request.seed)
        if token in request.ends:
            return tokens, "stop"
        tokens.append(token)
    return tokens, "length"


class Counting:
    """A constraint that depends on the number of tokens: the remainder of each id by 3, and the end after `length`."""

    def __init__(self, vocab_size, length):
        self.vocab_size, self.end_ids, self._left = vocab_size, (2,), length
        self.length = length

    def ids(self):
        return np.arange(6 + self._left % 3, LAST_ID, 3) if self._left else np.array(self.end_ids)

    def allowed(self):
        return packed(self.ids(), self.vocab_size)

    def accept(self, token):
        if token not in self.ids():
            raise ValueError("a token that was not allowed")
        self._left -= 1


class _Row:
    def __init__(self, request, length):
        self.request, self.length = request, length
        self.left, self.running = request.max_tokens, True


class ScriptedSlots:
    """Stands in for `Slots`. A row reads its text from its pages, so a wrong page is a wrong text."""

    lockstep, width = Lockstep(False), 1

    def __init__(self, model, params, *, slots, positions, num_pages, suppressed, draft, mesh):
        self.pages = SlotPages(slots, positions, num_pages, CHUNK)
        self.suppressed, self.draft, self.mesh = suppressed, draft, mesh
        self.chunk, self.widths, self._slots = CHUNK, (PAGE_SIZE, CHUNK), slots
        self._stored = np.full((num_pages, PAGE_SIZE), -1)
        self._rows, self._read_length = {}, 0

    def read(self, slot, prompt, done):
        part = prompt[done : done + CHUNK]
        for place, token in enumerate(part, done):
            if token:  # not of the warm-up, whose slot has no pages
                self._store(slot, place, token)
        self._read_length = done + len(part)
        return len(part)

    def start(self, slot, request):
        if any(request.prompt):
            assert self._read_length == len(request.prompt)
        self._rows[slot] = _Row(request, self._read_length)

    def advance(self, keep, known, masks, steps, until_free):
        out = _no_steps(self._slots)
        for slot, row in self._rows.items():
            row.running &= bool(keep[slot])
        started = [slot for slot, row in self._rows.items() if row.running]
        taken = 0
        while taken < min(steps, MOST_STEPS):
            running = [slot for slot in started if self._rows[slot].running]
            if not running or (until_free and len(running) < len(started)):
                break
            for slot in running:
                self._step(slot, known.get(slot, []), masks, out)
            taken += 1
        out.steps[...] = taken
        return out

    def _step(self, slot, known, masks, out):
        row, count = self._rows[slot], out.counts[slot]
        text = [self._stored[self._place(slot, i)] for i in range(row.length)]
        token = next_token(text, row.request.seed)
        if masks is not None and masks.constrained[slot]:
            assert count >= len(known), "a mask is for the first token that is not known"
            token = among(
                np.flatnonzero(np.unpackbits(masks.allowed[slot].view(np.uint8), bitorder="little")),
                text,
                row.request.seed,
            )
        if count < len(known):
            assert row.request.constraint or token == known[count], "a token that is computed again is another one"
            token = known[count]
        if token in row.request.ends:
            out.ended[slot], row.running = True, False
            return
        top = most_probable(text, MOST_TOP)
        out.tokens[slot, count], out.log_probabilities[slot, count] = token, log_probability(text, token)
        out.top_tokens[slot, count], out.top_log_probabilities[slot, count] = zip(*top, strict=True)
        out.counts[slot] += 1
        row.left -= 1
        row.running = row.left > 0
        if row.running:
            self._store(slot, row.length, token)
            row.length += 1

    def _place(self, slot, place):
        return self.pages.table[slot, place // PAGE_SIZE], place % PAGE_SIZE

    def _store(self, slot, place, token):
        assert place < len(self.pages._pages[slot]) * PAGE_SIZE, "a slot has too few pages"
        self._stored[self._place(slot, place)] = token


def _no_steps(slots):
    shape = slots, MOST_STEPS
    floats, whole = np.zeros(shape), np.zeros(shape, int)
    tops = np.zeros((*shape, MOST_TOP), int), np.zeros((*shape, MOST_TOP))
    names = ("counts", "steps", "proposed", "accepted")
    return Steps(
        tokens=whole,
        log_probabilities=floats,
        top_tokens=tops[0],
        top_log_probabilities=tops[1],
        ended=np.zeros(slots, bool),
        failed_at=np.full(slots, -1),
        **{name: np.zeros(slots, int) for name in names},
    )
