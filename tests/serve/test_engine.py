"""The engine: the text of a request does not depend on the other requests, the queue, or shared prefixes."""

import itertools
import queue
import threading
import time
import types

import jax
import numpy as np
import pytest
from serve_parts import answers, prompts, started_engine, tiny_parts

from transformer import CausalLM, TransformerConfig
from transformer.config import LearnedOptions
from transformer.config._checks import ConfigError
from transformer.generate import Sampling, generate
from transformer.generate._rows import MOST_STEPS
from transformer.serve import Engine, EngineClosedError, QueueFullError, Request, _metrics
from transformer.serve import _scheduler as module
from transformer.serve._engine import _check_sizes
from transformer.serve._lockstep import PING
from transformer.serve._metrics import Metrics

POSITIONS = 100  # widths 16, 32 and 64: chunks of 64 tokens


@pytest.fixture(scope="module")
def parts():
    return tiny_parts(num_layers=1)


@pytest.fixture(scope="module")
def engine(parts):
    made = Engine(*parts, slots=3, positions=POSITIONS, queue=40)
    made.warm_up()
    made.start()
    yield made
    made.close()


def test_greedy_tokens_equal_generate(engine, parts):
    model, params, _ = parts
    rows = prompts(8)
    requests = [Request(prompt=row, max_tokens=20, sampling=Sampling(temperature=0.0), eos_ids=(7, 9)) for row in rows]
    got, _ = answers(engine, requests)
    wanted = generate(model, params, rows, max_new_tokens=20, sampling=Sampling(temperature=0.0), eos_id=[7, 9])
    assert [tokens for _, tokens, _ in got] == wanted
    assert [finish for _, _, finish in got] == ["length" if len(row) == 20 else "stop" for row in wanted]


SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8),
    Sampling(temperature=1.3, top_k=7),
    Sampling(top_p=0.7),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(top_k=30, top_p=0.8, min_p=0.02),
    Sampling(temperature=0.0, repetition_penalty=1.7),
    Sampling(temperature=0.9, presence_penalty=0.5, frequency_penalty=0.4),
]


def test_a_sample_depends_only_on_its_request(engine, parts):
    """Each request alone, all together, and `generate` with the same seed: the same tokens and log-probabilities."""
    model, params, _ = parts
    rows = prompts(len(SAMPLINGS), seed=1, longest=16)
    requests = [
        Request(prompt=row, max_tokens=14, sampling=sampling, seed=3 + i, top=2 * (i % 3))
        for i, (row, sampling) in enumerate(zip(rows, SAMPLINGS, strict=True))
    ]
    together, tokens_together = answers(engine, requests)
    for i, request in enumerate(requests):
        alone, tokens_alone = answers(engine, [request])
        assert alone[0] == together[i]
        assert tokens_alone[0] == tokens_together[i]
        if i in (5, 7):  # each kind of sampling is another program of `generate`
            (wanted,) = generate(model, params, [rows[i]], max_new_tokens=14, sampling=SAMPLINGS[i], seed=3 + i)
            assert alone[0][1] == wanted


def test_log_probabilities_are_returned(engine, parts):
    model, params, _ = parts
    row = prompts(1, seed=2)[0]
    (answer,), (tokens,) = answers(engine, [Request(prompt=row, max_tokens=5, seed=8, top=3)])
    tokens_read = np.array([row + answer[1]], np.int32)
    logits = np.asarray(jax.jit(model.apply)({"params": params}, tokens_read), np.float64)[0]
    expected = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    for i, token in enumerate(tokens):
        at = expected[len(row) - 1 + i]
        np.testing.assert_allclose(token.log_probability, at[token.id], rtol=1e-5, atol=1e-5)
        assert [one for one, _ in token.top] == np.argsort(-at)[:3].tolist()


def test_a_shared_prefix_does_not_change_results(engine):
    prefix = [11 + i % 200 for i in range(64)]
    requests = [Request(prompt=[*prefix, 20 + i], max_tokens=8, seed=i) for i in range(4)]
    before = engine.metrics.shared_tokens
    first, _ = answers(engine, requests[:1])
    rest, _ = answers(engine, requests[1:])
    assert engine.metrics.shared_tokens - before == 3 * 64
    # One token of the first chunk differs, so nothing is shared.
    before = engine.metrics.shared_tokens
    answers(engine, [Request(prompt=[*prefix[:40], 280, *prefix[41:], 20], max_tokens=1)])
    assert engine.metrics.shared_tokens == before
    # Other prompts use all pages, so that nothing is shared.
    answers(engine, [Request(prompt=[6 + i] * 95, max_tokens=3) for i in range(9)])
    before = engine.metrics.shared_tokens
    again, _ = answers(engine, requests[3:])
    assert engine.metrics.shared_tokens == before
    assert again[0] == rest[-1]
    assert first[0] != rest[0]


def test_stop_strings_end_a_request(engine, parts):
    row = prompts(1, seed=4)[0]
    request = Request(prompt=row, max_tokens=25, sampling=Sampling(temperature=0.0))
    ((text, _, _),), _ = answers(engine, [request])
    stop = text[6:9]
    ((cut, _, finish),), _ = answers(
        engine, [Request(prompt=row, max_tokens=25, sampling=request.sampling, stop=(stop,))]
    )
    assert (cut, finish) == (text[: text.index(stop)], "stop")


def test_cancelled_requests_free_their_slots(engine):
    events = queue.Queue()
    long = Request(prompt=[5, 6], max_tokens=POSITIONS - 2, sampling=Sampling(temperature=0.0))
    tickets = engine.submit([long] * 6, lambda number, delta: events.put((number, delta)))
    events.get(timeout=60)
    for ticket in tickets:
        ticket.cancel()
    finishes = {}
    while len(finishes) < 6:
        number, delta = events.get(timeout=60)
        finishes |= {number: delta.finish} if delta.finish else {}
    assert "cancelled" in finishes.values()
    assert answers(engine, [Request(prompt=[5], max_tokens=2)])[0][0][2] == "length"
    assert (engine.running, engine.waiting) == (0, 0)


def test_a_request_of_an_unreachable_client_is_cancelled(engine):
    """As when the event loop of the client is closed: its slot is free for others at once."""
    finished = threading.Event()

    def deliver(number, delta):
        if delta.finish is not None:
            finished.set()
        raise RuntimeError("Event loop is closed")

    before = dict(engine.metrics.finished)
    engine.submit([Request(prompt=[5], max_tokens=90)], deliver)
    assert finished.wait(60)
    assert engine.metrics.finished["cancelled"] == before["cancelled"] + 1
    assert engine.metrics.finished["length"] == before["length"]
    assert answers(engine, [Request(prompt=[6], max_tokens=2)])[0][0][2] == "length"


def test_at_most_one_prompt_chunk_is_read_between_steps(parts):
    """Before its start the engine queues all; chunks have 64 tokens."""
    engine = Engine(*parts, slots=4, positions=POSITIONS, queue=9)
    lengths, calls = [10, 54, 70, 5], []
    device = engine._device
    read, advance = device.read, device.advance
    device.read = lambda *given: (calls.append(read(*given)), calls[-1])[1]
    device.advance = lambda *given: (calls.append("steps"), advance(*given))[1]
    done = queue.Queue()
    requests = [Request(prompt=[7 + i] * length, max_tokens=4) for i, length in enumerate(lengths)]
    engine.submit(requests, lambda number, delta: delta.finish and done.put(number))
    engine.start()
    for _ in lengths:
        done.get(timeout=60)
    engine.close()
    assert calls[: calls.index("steps", 6)] == [10, 54, "steps", 64, "steps", 6, 5]


def test_a_call_fills_its_output(parts, monkeypatch):
    """The number of steps per call doubles, as long as a call is quick, to the size of its output."""
    monkeypatch.setattr("transformer.serve._scheduler.SECONDS", 1e9)
    with started_engine(parts, POSITIONS) as engine:
        advance, made = engine._device.advance, []
        engine._device.advance = lambda *given: (made.append(advance(*given)), made[-1])[1]
        answers(engine, [Request(prompt=[5, 6], max_tokens=60)])
    assert [int(out.steps.max()) for out in made][:5] == [1, 2, 4, 8, MOST_STEPS]


def test_steps_per_device_call_grow_while_calls_are_short(parts, monkeypatch):
    """With a call of 0.03 s for any number of steps: they grow by 1.7 per call, up to the limit."""
    seconds = itertools.count(0, 0.03)
    clock = types.SimpleNamespace(perf_counter=lambda: next(seconds), monotonic=time.monotonic)
    monkeypatch.setattr(module, "time", clock)
    engine, steps = Engine(*parts, slots=1, positions=POSITIONS, queue=2), []
    advance = engine._device.advance
    engine._device.advance = lambda *given: (steps.append(given[3]), advance(*given))[1]
    engine.start()
    answers(engine, [Request(prompt=[5], max_tokens=90)])
    engine.close()
    assert steps[:5] == [1, 2, 3, 5, 8]
    assert steps[-1] == MOST_STEPS


def test_a_learned_position_table_limits_the_length():
    model = CausalLM(
        TransformerConfig(vocab_size=7, d_model=6, num_heads=3, num_layers=1, position=LearnedOptions(max_length=32))
    )
    _check_sizes(model, 1, 32, 32, 0)
    with pytest.raises(ConfigError, match=r"32 positions.*33"):
        _check_sizes(model, 1, 33, 33, 0)


def test_the_warm_up_reports_each_program(parts):
    engine, reports = Engine(*parts, slots=2, positions=32), []
    engine.warm_up(lambda done, total: reports.append((done, total)))
    assert reports == [(done, len(reports)) for done in range(1, len(reports) + 1)]
    assert len(reports) == len(engine._device.widths) + 2


def test_histogram_buckets_are_narrow():
    """A bucket ends at most 3.34 times as high as the one before."""
    bounds = np.array(_metrics.SECONDS)
    assert (bounds[0], bounds[-1]) == (0.01, 100)
    assert (np.diff(bounds) > 0).all()
    assert (bounds[1:] / bounds[:-1] < 3.34).all()


def test_counters_start_at_zero():
    lines = [line for line in Metrics().text(running=0, waiting=0, slots=0).splitlines() if line[0] != "#"]
    assert len(lines) > 20
    assert {float(line.rpartition(" ")[2]) for line in lines} == {0.0}


def test_an_idle_engine_sends_heartbeats_to_other_processes(parts, monkeypatch):
    """They wait for its next call in a collective operation, which times out."""
    sent, arrived = [], threading.Event()

    class Others:
        is_shared = True

        def send(self, name, arrays=None):
            sent.append(name)
            arrived.set()

    monkeypatch.setattr("transformer.serve._engine.PING_SECONDS", 0.01)
    engine = Engine(*parts, slots=2, positions=32)
    engine._device.lockstep = Others()
    engine.start()
    assert arrived.wait(timeout=60)
    engine.close()
    assert sent[0] == PING


def test_a_preempted_prompt_keeps_its_read_tokens(parts):
    """The calls of the engine's thread, one by one: the second time, its pages are found as those of a prefix."""
    engine = Engine(*parts, slots=3, positions=POSITIONS)
    engine.submit([Request(prompt=[5 + i % 9 for i in range(90)], max_tokens=4)], lambda number, delta: None)
    engine._scheduler.take_next()
    engine._scheduler._read_part()
    assert engine._scheduler.reading.done == 64  # one chunk
    engine._scheduler._preempt_youngest()
    assert (engine.metrics.preemptions, engine.running, engine.waiting) == (1, 0, 1)
    engine._scheduler.take_next()
    assert engine._scheduler.reading.done == engine.metrics.shared_tokens == 64


def test_a_full_queue_rejects_requests(parts):
    """Before its start an engine only queues: 2 slots and 1 place in the queue."""
    engine = Engine(*parts, slots=2, positions=32, queue=1)
    one = Request(prompt=[5], max_tokens=2)
    events = queue.Queue()
    engine.submit([one] * 3, lambda number, delta: events.put(delta.finish))
    with pytest.raises(QueueFullError, match="the queue holds 1"):
        engine.submit([one], lambda number, delta: None)
    engine.start()
    engine.close(seconds=60)  # finishes what was accepted
    assert [events.get_nowait() for _ in range(events.qsize())].count("length") == 3
    with pytest.raises(EngineClosedError, match="shutting down"):
        engine.submit([one], lambda number, delta: None)


def test_an_engine_failure_answers_all_requests_with_an_error(parts, monkeypatch, capsys):
    engine = Engine(*parts, slots=1, positions=32)
    monkeypatch.setattr(engine._scheduler, "_read_part", lambda: 1 / 0)
    events = queue.Queue()
    engine.submit([Request(prompt=[5], max_tokens=2)] * 2, lambda number, delta: events.put((number, delta.finish)))
    engine.start()
    assert {events.get(timeout=30) for _ in range(2)} == {(0, "error"), (1, "error")}
    assert "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(EngineClosedError, match="has failed"):
        engine.submit([Request(prompt=[5], max_tokens=2)], lambda number, delta: None)
    engine.close()
    assert not any(thread is engine._thread for thread in threading.enumerate())


def test_non_finite_values_end_only_their_own_request(parts):
    model, params, tokenizer = parts
    params = jax.tree.map(lambda leaf: leaf, params)
    params["embedding"] = jax.tree.map(np.copy, params["embedding"])
    (table,) = jax.tree.leaves(params["embedding"])
    table[3] = np.nan
    engine = Engine(model, params, tokenizer, slots=2, positions=32)
    engine.start()
    greedy = Sampling(temperature=0.0)
    got, _ = answers(engine, [Request(prompt=[row], max_tokens=3, sampling=greedy) for row in (3, 4)])
    engine.close()
    assert [finish for _, _, finish in got] == ["error", "length"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [10**6]}, "token ids must be from 0"),
        ({"max_tokens": POSITIONS}, "at most 100 tokens"),
        ({"eos_ids": tuple(range(9))}, "at most 8 ids"),
        ({"top": 21}, "from 0 to 20"),
        ({"sampling": Sampling(suppress=(10**6,))}, "suppress"),
    ],
)
def test_rejects_invalid_requests(engine, changed, message):
    with pytest.raises(ValueError, match=message):
        engine.submit([Request(**{"prompt": [5], "max_tokens": 2, **changed})], lambda number, delta: None)


@pytest.mark.parametrize("changed", [{"slots": 0}, {"positions": 8}, {"queue": -1}])
def test_rejects_invalid_sizes(parts, changed):
    with pytest.raises(ConfigError, match=next(iter(changed))):
        Engine(*parts, **changed)
