"""Translations over HTTP with the client of OpenAI: those of `translate_lines`."""

import threading
import time

import openai
import pytest
from inference_parts import write_models
from starlette.testclient import TestClient

from transformer.cli._services import ServiceSettings, make_service
from transformer.generate import Beam
from transformer.inference import open_model, translate_lines

TEXTS = ["the big cat sat on the small mat", "a dog ran"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(write_models(tmp_path_factory.mktemp("weights"))["translator"])


@pytest.fixture(scope="module")
def service(opened):
    made = make_service(opened, ServiceSettings(slots=1, max_tokens=None))
    made.warm_up(lambda done, total: None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(service):
    http = TestClient(service.application(), base_url="http://localhost")
    return openai.OpenAI(base_url="http://localhost/v1", api_key="unused", max_retries=0, http_client=http)


def translations(opened, beam, **options):
    return [
        one for chunk in translate_lines(opened, TEXTS, beam=beam, **options) for line in chunk for one in line.best
    ]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("fields", "beam"),
    [
        ({}, Beam()),
        ({"best_of": 1}, Beam(size=1)),
        ({"extra_body": {"num_beams": 2, "length_penalty": 0}, "n": 2}, Beam(size=2, alpha=0.0, n_best=2)),
    ],
)
def test_translations_equal_the_translate_command(client, opened, fields, beam):
    wanted = translations(opened, beam, max_new_tokens=9)
    got = client.completions.create(model="translator", prompt=TEXTS, max_tokens=9, **fields)
    assert [choice.text for choice in got.choices] == [one.text for one in wanted]
    assert [choice.finish_reason for choice in got.choices] == ["stop" if one.ended else "length" for one in wanted]
    assert [choice.index for choice in got.choices] == list(range(len(wanted)))
    rows = [list(opened.tokenizer.encode_source(text)) for text in TEXTS]
    assert got.usage.prompt_tokens == sum(map(len, rows))
    assert 0 < got.usage.completion_tokens <= 9 * len(wanted)
    by_ids = client.completions.create(model="translator", prompt=rows, max_tokens=9, **fields)
    assert by_ids.choices == got.choices


def test_many_prompts_keep_their_order(client):
    """More prompts than are searched together."""
    prompts = [f"the {word} ran" for word in ("cat", "dog", "mat", "tree", "big")]
    got = client.completions.create(model="translator", prompt=prompts, max_tokens=4, best_of=1)
    alone = [client.completions.create(model="translator", prompt=one, max_tokens=4, best_of=1) for one in prompts]
    assert [choice.text for choice in got.choices] == [one.choices[0].text for one in alone]


CALLS = [
    {"model": "translator", "max_tokens": 4, "best_of": 1, **call}
    for call in ({"prompt": "a dog ran"}, {"prompt": TEXTS[0]}, {"prompt": TEXTS}, {"prompt": "a cat", "best_of": 2})
]


@pytest.fixture(scope="module")
def answers_alone(client):
    return [client.completions.create(**call) for call in CALLS]


def test_waiting_requests_are_batched(client, service, answers_alone, monkeypatch):
    """Those with the same options; the translations are those of the calls alone."""
    computing, proceed, searches, found = threading.Event(), threading.Event(), [], {}
    search = service._search

    def slow(sources, beam, most):
        searches.append((len(sources), beam.size))
        computing.set()
        assert proceed.wait(60)
        return search(sources, beam, most)

    def ask(number):
        found[number] = client.completions.create(**CALLS[number])

    monkeypatch.setattr(service, "_search", slow)
    threads = [threading.Thread(target=ask, args=[number]) for number in range(len(CALLS))]
    threads[0].start()
    assert computing.wait(60)
    for thread in threads[1:]:
        thread.start()
    deadline = time.monotonic() + 30
    while service.load.waiting < len(CALLS) - 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    proceed.set()
    for thread in threads:
        thread.join()
    assert searches[0] == (1, 1)
    assert sorted(searches[1:]) == [(1, 2), (3, 1)]
    for number, wanted in enumerate(answers_alone):
        assert found[number].choices == wanted.choices
        assert found[number].usage == wanted.usage


def test_joined_stream_chunks_equal_the_whole_answer(client):
    common = {"model": "translator", "prompt": TEXTS, "max_tokens": 9}
    whole = client.completions.create(**common)
    *parts, last = client.completions.create(**common, stream=True, stream_options={"include_usage": True})
    assert [part.choices[0].text for part in parts] == [choice.text for choice in whole.choices]
    assert last.usage == whole.usage


@pytest.mark.parametrize(
    ("changed", "param", "message"),
    [
        ({"best_of": 3}, "best_of", "one of 1, 2, 4, 8"),
        ({"best_of": 100}, "best_of", "from 1 to 8"),
        ({"best_of": 1, "n": 2}, "best_of", r"at least n \(2\), got 1"),
        ({"best_of": 1, "extra_body": {"num_beams": 2}}, "num_beams", "Send one of them"),
        ({"extra_body": {"length_penalty": "long"}}, "length_penalty", "number from 0 to 8"),
        ({"extra_body": {"beams": 2}}, "beams", "unknown field"),
        ({"logprobs": 0}, "logprobs", "must be null: this model translates"),
        ({"temperature": 0.7}, "temperature", "must be 0: this model translates"),
        ({"prompt": ["a"] * 17}, "prompt", "at most 16 texts"),
        ({"prompt": " "}, "prompt", "at least one token"),
        ({"prompt": [[10**9]]}, "prompt", "ids from 0 to"),
        ({"prompt": "the cat " * 1000}, "prompt", "a source can have at most"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
    ],
)
def test_rejects_invalid_fields(client, changed, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(**{"model": "translator", "prompt": "a", "max_tokens": 2, **changed})
    assert caught.value.param == param


def test_a_long_request_ends_with_the_server(client, service, monkeypatch):
    monkeypatch.setattr(service, "closing", True)
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        client.completions.create(model="translator", prompt="a", max_tokens=2)
