"""What a server holds: requests leave no Python objects and no arrays behind."""

import gc

import jax
import pytest
from chat_parts import write_chat_model
from serve_parts import answers, prompts, started_engine, tiny_parts
from starlette.testclient import TestClient

from transformer.cli._services import ServiceSettings, make_service
from transformer.generate import Sampling
from transformer.inference import open_model
from transformer.serve import Request

TOGETHER = 20
"""requests that are sent at a time"""
MOST_OBJECTS = 200
"""objects that may be more after all requests: caches of other libraries, and counters with new keys"""


def counts():
    """Return the number of objects that the garbage collector tracks, and of arrays on devices."""
    gc.collect()
    return len(gc.get_objects()), len(jax.live_arrays())


def grown(send, requests):
    """Return how many objects and arrays are more after this number of requests; `send(n)` sends request number n."""
    for number in range(3 * TOGETHER):  # fills caches and compiles
        send(number)
    before = counts()
    for number in range(3 * TOGETHER, 3 * TOGETHER + requests):
        send(number)
    return [after - first for after, first in zip(counts(), before, strict=True)]


@pytest.mark.parametrize("requests", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_engine_requests_leak_no_objects(requests):
    """Among them are preempted, cancelled and shared ones; the pages of the pool get other prompts many times."""
    with started_engine(tiny_parts(num_layers=1), 100, cache_tokens=112) as engine:
        prefix = [11 + i % 200 for i in range(64)]  # one chunk

        def send(number):
            if number % TOGETHER:
                return
            rows = [
                prefix + row if i % 9 == 0 else row for i, row in enumerate(prompts(TOGETHER, seed=number, longest=9))
            ]
            sampled = Sampling(temperature=0.8)
            made = [
                Request(prompt=row, max_tokens=45 if i % 6 == 1 else 1 + i % 3, sampling=sampled, seed=i)
                for i, row in enumerate(rows)
            ]
            (ticket,) = engine.submit(made[:1], lambda number, delta: None)
            answers(engine, made)
            ticket.cancel()

        objects, arrays = grown(send, requests)
        assert engine.metrics.preemptions > 0
        assert engine.metrics.shared_tokens > 0
    assert objects < MOST_OBJECTS
    assert arrays < 30, "those of a call that is still running"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(write_chat_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def service(opened):
    made = make_service(opened, ServiceSettings(slots=2, max_tokens=64))
    made.warm_up(lambda done, total: None)
    made.start()
    yield made
    made.close()


def test_http_requests_leak_no_objects(service):
    """Streams and whole answers, refused requests, and requests for a path that does not exist."""
    client = TestClient(service.application(), base_url="http://127.0.0.1")

    def send(number):
        messages = [{"role": "user", "content": f"Number {number}"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 2, "stream": number % 2 == 0, "seed": number}
        body |= {"n": 99} if number % 7 == 0 else {}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == (400 if number % 7 == 0 else 200), answer.text
        assert client.get(f"/{number}").status_code == 404

    with client:
        objects, arrays = grown(send, 150)
    assert objects < MOST_OBJECTS
    assert arrays < 30
