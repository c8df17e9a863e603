"""States of the engine that occur only in combination: preempted, cancelled, sharing a prefix, stopped.

The slots are scripted (`scripted_slots`), and the turns of the engine's thread are made one by one.
"""

import collections
import dataclasses
import random

import pytest
from scripted_slots import (
    CHUNK,
    Counting,
    ScriptedSlots,
    among,
    log_probability,
    most_probable,
    next_token,
    text_of,
)
from serve_parts import tiny_parts

from transformer.serve import Engine, QueueFullError, Request
from transformer.serve._slots import PAGE_SIZE

POSITIONS = 5 * CHUNK


@pytest.fixture(scope="module")
def parts():
    return tiny_parts(num_layers=1)


@pytest.fixture
def make(parts, monkeypatch):
    monkeypatch.setattr("transformer.serve._engine.Slots", ScriptedSlots)
    return lambda **options: Engine(*parts, **({"slots": 3, "positions": POSITIONS} | options))


class Client:
    """Submits requests to an engine and collects its answers."""

    def __init__(self, engine):
        self.engine, self.tickets = engine, []
        self.texts, self.tokens, self.finish = collections.defaultdict(str), collections.defaultdict(list), {}

    def submit(self, *requests):
        first = len(self.tickets)
        self.tickets += self.engine.submit(requests, lambda number, delta: self._add(first + number, delta))

    def _add(self, number, delta):
        assert number not in self.finish, "a part after the last one"
        self.texts[number] += delta.text
        self.tokens[number] += delta.tokens
        if delta.finish:
            self.finish[number] = delta.finish

    def turn(self):
        """Make one turn of the engine's thread."""
        with self.engine._changed:
            self.engine._scheduler.take_next()
        self.engine._scheduler.read_parts()
        self.engine._scheduler.generate()

    def finished(self):
        for _ in range(2000):
            if not self.engine._scheduler.has_work:
                return self
            self.turn()
        raise AssertionError("the engine makes no progress")


def fresh(request):
    """Return a request whose constraint, if it has one, was not used."""
    given = request.constraint
    return dataclasses.replace(request, constraint=given and Counting(given.vocab_size, given.length))


def alone(make, request):
    client = Client(make())
    client.submit(fresh(request))
    client.finished()
    return client.texts[0], client.tokens[0], client.finish[0]


def drawn_request(draw, vocab_size):
    prefix = [11 + i % 200 for i in range(CHUNK * draw.choice([0, 0, 1, 2]))]
    prompt = [*prefix, *(draw.randrange(5, 280) for _ in range(draw.choice([1, 3, PAGE_SIZE, CHUNK + 5])))]
    return Request(
        prompt=prompt,
        max_tokens=draw.randint(1, POSITIONS - len(prompt)),
        seed=draw.randrange(4),
        eos_ids=tuple(draw.sample(range(5, 280), draw.choice([0, 2]))),
        stop=(draw.choice(["e", "a", " t"]),) * (draw.random() < 0.3),
        top=draw.choice([0, 1, 3]),
        constraint=Counting(vocab_size, draw.randint(3, 60)) if draw.random() < 0.3 else None,
    )


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_concurrent_texts_equal_single_requests(make, seed):
    """With few pages, shared prefixes, and clients that leave while their text waits, is read or is generated."""
    draw = random.Random(seed)
    engine = make(cache_tokens=POSITIONS + 3 * PAGE_SIZE, queue=60)
    client, requests, left, states = (
        Client(engine),
        [drawn_request(draw, engine.vocab_size) for _ in range(40)],
        set(),
        set(),
    )
    waiting = list(requests)
    while waiting or engine._scheduler.has_work:
        if waiting and draw.random() < 0.4:
            group = [waiting.pop(0) for _ in range(min(len(waiting), draw.randint(1, 4)))]
            client.submit(*map(fresh, group))
        if draw.random() < 0.15 and (ongoing := [i for i in range(len(client.tickets)) if i not in client.finish]):
            reading = engine._scheduler.reading and client.tickets.index(engine._scheduler.reading.ticket)
            number = draw.choice(ongoing) if reading is None or draw.random() < 0.2 else reading
            left.add(number)
            states.add("reading" if number == reading else "waiting" if not client.tokens[number] else "generating")
            client.tickets[number].cancel()
        client.turn()
        held = sum(len(pages) for pages in engine._device.pages._pages)
        assert engine._device.pages.num_free >= engine.pages - held
    assert states == {"reading", "waiting", "generating"}
    assert min(engine.metrics.preemptions, engine.metrics.shared_tokens, engine.metrics.recomputed_tokens) > 0
    assert engine._device.pages.num_free == engine.pages
    assert engine.metrics.generated_tokens == sum(map(len, client.tokens.values()))
    for number, request in enumerate(requests):
        text, tokens, finish = alone(make, request)
        found = client.tokens[number]
        if client.finish[number] == "cancelled":
            assert number in left
            assert found == tokens[: len(found)]
            assert text.startswith(client.texts[number])
        else:
            assert (client.texts[number], found, client.finish[number]) == (text, tokens, finish)
        _check_tokens(request, found, finish)
    assert set(client.finish.values()) == {"cancelled", "stop", "length"}


def _check_tokens(request, tokens, finish):
    """Compare tokens and their log-probabilities with the script of the slots."""
    ids = [token.id for token in tokens]
    if request.constraint is None:
        wanted, reason = text_of(request)
        assert ids == wanted[: len(ids)]
        assert request.stop or finish in (reason, "cancelled")
    constraint = fresh(request).constraint
    for i, token in enumerate(tokens):
        text = [*request.prompt, *ids[:i]]
        if constraint is not None:
            assert token.id == among(constraint.ids(), text, request.seed)
            constraint.accept(token.id)
        assert token.log_probability == log_probability(text, token.id)
        assert token.top == most_probable(text, request.top)


def test_cancelling_during_prefill_frees_the_pages(make):
    """Also if others wait for these pages."""
    engine = make(slots=2, cache_tokens=POSITIONS)
    client = Client(engine)
    client.submit(*(Request(prompt=[5 + number] * (POSITIONS - 4), max_tokens=4) for number in range(2)))
    client.turn()
    assert engine._scheduler.reading is not None
    assert engine._device.pages.num_free < engine.pages
    client.tickets[0].cancel()
    client.turn()
    assert client.finish == {0: "cancelled"}
    assert client.finished().finish[1] == "length"
    assert engine._device.pages.num_free == engine.pages


def test_the_queue_size_excludes_free_slots(make):
    """A slot counts while it is free, not while a prompt is read or a text generated in it."""
    engine = make(slots=2, queue=3)
    client = Client(engine)
    long = Request(prompt=[7] * (2 * CHUNK + 1), max_tokens=60)
    client.submit(long)
    client.turn()  # reads
    assert (engine.running, engine.waiting) == (1, 0)
    with pytest.raises(QueueFullError):
        client.submit(*[long] * 5)
    client.submit(*[long] * 4)
    while len(engine._scheduler.active) < 2:
        client.turn()
    assert (engine.running, engine.waiting) == (2, 3)
    with pytest.raises(QueueFullError, match="queue holds 3"):
        client.submit(long)
    client.tickets[-1].cancel()
    client.turn()  # a request that left makes room
    client.submit(long)
    assert len(client.finished().finish) == 6


def test_a_preempted_text_delivers_each_token_once(make):
    """With the log-probabilities of its alternatives, which are computed again too."""
    engine = make(slots=2, cache_tokens=POSITIONS)
    client = Client(engine)
    requests = [Request(prompt=[5 + number] * 20, max_tokens=100, seed=number, top=2) for number in range(2)]
    client.submit(*requests)
    client.finished()
    assert engine.metrics.preemptions == 1
    assert engine.metrics.recomputed_tokens > 16
    for number, request in enumerate(requests):
        assert len(client.tokens[number]) == 100
        _check_tokens(request, client.tokens[number], client.finish[number])


def test_a_preempted_text_runs_before_waiting_requests(make):
    """A short request that came later does not get its pages, so that a long text does not wait for ever."""
    engine = make(slots=2, cache_tokens=POSITIONS)
    client = Client(engine)
    client.submit(*(Request(prompt=[5 + number] * 20, max_tokens=100, seed=number) for number in range(2)))
    client.submit(Request(prompt=[9] * 4, max_tokens=2))
    while not engine.metrics.preemptions:
        client.turn()
    assert [ticket.number for ticket in engine._scheduler.queue] == [2, 3]
    assert next(iter(client.finished().finish)) == 0


def test_a_preempted_text_can_be_cancelled_or_stopped(make):
    """One is cancelled while it waits to be computed again; the other ends with a stop string afterwards."""
    for leaves in (True, False):
        engine = make(slots=2, cache_tokens=POSITIONS)
        client = Client(engine)
        plain = Request(prompt=[6] * 20, max_tokens=130, seed=1)
        whole, _, _ = alone(make, plain)
        stop = whole[-8:-4]
        client.submit(
            Request(prompt=[5] * 20, max_tokens=130), Request(prompt=[6] * 20, max_tokens=130, seed=1, stop=(stop,))
        )
        while not engine.metrics.preemptions:
            client.turn()
        if leaves:
            client.tickets[1].cancel()
        client.finished()
        assert client.finish == {0: "length", 1: "cancelled" if leaves else "stop"}
        expected = whole[: whole.index(stop)]
        assert expected.startswith(client.texts[1]) if leaves else client.texts[1] == expected
        assert engine._device.pages.num_free == engine.pages


def test_tokens_after_a_stop_string_are_not_delivered(make, monkeypatch):
    """A call computes up to 16 tokens, of which those after the stop string are neither delivered nor counted."""
    monkeypatch.setattr("transformer.serve._scheduler.SECONDS", 1e9)
    request = Request(prompt=[9] * 5, max_tokens=64, top=1)
    whole, tokens, _ = alone(make, request)
    stop = whole[40:44]
    engine = make()
    client = Client(engine)
    client.submit(Request(prompt=[9] * 5, max_tokens=64, top=1, stop=(stop,)))
    client.finished()
    assert (client.texts[0], client.finish[0]) == (whole[: whole.index(stop)], "stop")
    assert 0 < len(client.tokens[0]) < len(tokens)
    assert client.tokens[0] == tokens[: len(client.tokens[0])]
    assert engine.metrics.generated_tokens == len(client.tokens[0])


def test_an_end_token_is_not_part_of_the_text(make):
    """Whichever of the end tokens comes first."""
    prompt = [9] * 5
    ids, _ = text_of(Request(prompt=prompt, max_tokens=30))
    ends = (ids[20], ids[11])
    assert next_token([*prompt, *ids[:11]], 0) == ids[11]
    text, tokens, finish = alone(make, Request(prompt=prompt, max_tokens=30, eos_ids=ends))
    assert ([token.id for token in tokens], finish) == (ids[: min(map(ids.index, ends))], "stop")
    assert text
