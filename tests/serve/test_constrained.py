"""Texts of a form: JSON schemas and regular expressions in the engine and over HTTP."""

import asyncio
import json
import random
import re
import time

import jsonschema
import numpy as np
import pytest
from serve_parts import answers, prompts, tiny_parts
from starlette.testclient import TestClient

from transformer.generate import Sampling
from transformer.inference import Grammars, _grammar_checks
from transformer.serve import Engine, Request, _constraints
from transformer.serve._constraints import MOST_GRAMMAR, Constraints, TextForm
from transformer.serve._errors import APIError
from transformer.serve._service import Service

pytest.importorskip("llguidance")

GREEDY = Sampling(temperature=0.0)
POSITIONS = 512


@pytest.fixture(scope="module")
def parts():
    return tiny_parts(num_layers=1)


@pytest.fixture(scope="module")
def engine(parts):
    made = Engine(*parts, slots=4, positions=POSITIONS, queue=200)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def grammars(parts):
    return Grammars(parts[2], parts[2].vocab_size)


@pytest.fixture(scope="module")
def client(engine, parts):
    ends = tuple(parts[2].eos_ids)
    service = Service(engine=engine, name="tiny", sampling=GREEDY, eos_ids=ends, chat=None)
    return TestClient(service.application(), base_url="http://localhost")


def drawn_schema(draw, depth=2):
    """A schema whose matches are short, so that a random model reaches their end: a record of an order."""
    leaves = [
        {"enum": draw.sample(["red", "grün", 'a"b\\\\', 7, 2.5, None, True], draw.randint(1, 3))},
        {"const": draw.choice(["fixed", 0, [1, "x"], {"k": None}])},
        {"type": "boolean"},
        {"type": ["null", "boolean"]},
        {"type": "integer", "minimum": (low := draw.randint(-99, 99)), "maximum": low + draw.randint(0, 500)},
        {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 5)},
        {"type": "string", "pattern": draw.choice([r"^[A-Z]{2}\\d{3}$", "^(yes|no)$", "^[a-c]{1,4}$"])},
        {"type": "string", "format": "date"},
    ]
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(leaves)
    parts = [drawn_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.3:
        return {"type": "array", "items": parts[0], "minItems": draw.randint(0, 2), "maxItems": draw.randint(2, 3)}
    if draw.random() < 0.3:
        return {"anyOf": parts}
    names = draw.sample(["id", "größe", "unit price", "tags", '"'], len(parts))
    required = draw.sample(names, draw.randint(0, len(names)))
    properties = dict(zip(names, parts, strict=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def test_every_answer_matches_its_schema(engine, grammars):
    """In a batch with texts of other schemas and of no form: the answers parse and are valid, for any model."""
    schemas = [drawn_schema(random.Random(number)) for number in range(100)]
    requests = [
        Request(prompt=[5 + number], max_tokens=400, seed=number, constraint=grammars.json_schema(schema))
        for number, schema in enumerate(schemas)
    ]
    free = [Request(prompt=row, max_tokens=9, seed=1) for row in prompts(4, longest=20)]
    alone = [answers(engine, [request])[0][0] for request in free]
    got, _ = answers(engine, [*requests[:2], *free, *requests[2:]])
    assert got[2:6] == alone
    for schema, (text, _, finish) in zip(schemas, [*got[:2], *got[6:]], strict=True):
        assert finish == "stop"
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0, top_k=5, repetition_penalty=1.3)])
def test_a_constrained_text_depends_only_on_its_request(engine, grammars, sampling):
    patterns = [r"[a-z]{3,8}@[a-z]{2,5}\.(de|com)", "(?i)yes|no", "<eos>é{2}", r"\d{4}-\d{2}"]

    def requests():
        return [
            Request(prompt=[9, i], max_tokens=60, seed=i, sampling=sampling, constraint=grammars.regex(pattern))
            for i, pattern in enumerate(patterns)
        ]

    together, tokens = answers(engine, requests())
    for i, request in enumerate(requests()):
        alone, tokens_alone = answers(engine, [request])
        assert (alone[0], tokens_alone[0]) == (together[i], tokens[i])
        assert re.fullmatch(patterns[i], alone[0][0])
        assert alone[0][2] == "stop"


class Stuck:
    """A constraint that can't be continued after some tokens: not allowed, not accepted, or nothing is allowed."""

    end_ids = ()

    def __init__(self, vocab_size, how):
        self.vocab_size, self._how, self._count = vocab_size, how, 0

    def allowed(self):
        if self._how == "allowed" and self._count == 2:
            raise ValueError("too complex")
        empty = self._how == "nothing" and self._count == 2
        return np.full((-(-self.vocab_size // 32),), 0 if empty else 2**32 - 1, np.uint32)

    def accept(self, token):
        self._count += 1
        if self._how == "accept" and self._count == 3:
            raise ValueError("too complex")


@pytest.mark.parametrize(("how", "count"), [("allowed", 2), ("accept", 3), ("nothing", 2)])
def test_a_constraint_that_fails_ends_only_its_own_text(engine, how, count):
    requests = [
        Request(prompt=[7], max_tokens=6, constraint=Stuck(engine.vocab_size, how)),
        Request(prompt=[8], max_tokens=6),
    ]
    got, _ = answers(engine, requests)
    assert [finish for _, _, finish in got] == ["error", "length"]
    assert len(got[0][1]) == count
    assert engine.failure is None


def test_rejects_a_constraint_of_a_different_vocabulary(engine):
    with pytest.raises(ValueError, match=r"constraint.*7"):
        engine.submit([Request(prompt=[5], max_tokens=2, constraint=Stuck(7, "allowed"))], lambda *_: None)


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_regex": r'\{"ok": (true|false)\}', "response_format": {"type": "text"}},
    ],
)
def test_response_formats_work_over_http(client, fields):
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 60, "temperature": 1.3, "seed": 1, **fields}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 4
    for choice in choices:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
        assert choice["finish_reason"] == "stop"


def test_json_object_format_works_over_http(client):
    body = {"prompt": "a", "max_tokens": 9, "response_format": {"type": "json_object"}}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"].startswith("{")


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-ahead"),
        ({"guided_regex": 5}, "guided_regex", "must be a text"),
        ({"guided_regex": "(" * 5000 + ")" * 5000}, "guided_regex", "nested parentheses"),
        ({"guided_regex": "a" * (MOST_GRAMMAR + 1)}, "guided_regex", "at most 65536 characters"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": [1]}, "guided_json", "an object, true or false"),
        ({"guided_json": {"type": "unknown"}}, "guided_json", "unknown"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "can't be continued"),
        ({"guided_json": nested(300)}, "guided_json", "recursion limit"),
        ({"guided_json": {"not": {"type": "string"}}}, "guided_json", "not"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
        ({"response_format": {"type": "xml"}}, "response_format", "text, json_object or json_schema"),
        ({"response_format": "json"}, "response_format", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "with a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": [1]}}, "response_format", "with a schema"),
        ({"response_format": {"type": "json_object", "extra": 1}}, "response_format", "unknown field 'extra'"),
    ],
)
def test_invalid_response_formats_are_one_line_errors(client, fields, param, message):
    response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


HUGE = {"type": "integer", "multipleOf": 123456789, "minimum": -(10**18), "maximum": 10**18}
"""needs gigabytes and minutes"""


class Client:
    """The request of a client that leaves after some seconds."""

    def __init__(self, seconds):
        self._seconds = seconds

    async def receive(self):
        await asyncio.sleep(self._seconds)
        return {"type": "http.disconnect"}


def test_rejects_a_schema_that_needs_gigabytes(client):
    response = client.post("/v1/completions", json={"prompt": "a", "guided_json": HUGE})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "guided_json")
    assert "does not compile within" in error["message"]
    fields = {"guided_json": {"type": "boolean"}, "max_tokens": 9}
    assert client.post("/v1/completions", json={"prompt": "a", **fields}).status_code == 200


@pytest.fixture
def unlimited(parts, monkeypatch):
    """Constraints whose schemas may take all time and memory."""
    monkeypatch.setattr(_grammar_checks, "SECONDS", 60.0)
    monkeypatch.setattr(_grammar_checks, "MOST_BYTES", 2**40)
    made = Constraints(parts[2], parts[2].vocab_size, queue=9)
    yield made
    made.close()


def test_a_disconnected_client_cancels_the_compilation_of_its_schema(unlimited):
    async def leave():
        with pytest.raises(APIError, match="the client has left"):
            await unlimited.make(Client(0.5), TextForm("guided_json", schema=HUGE), 1)
        return time.monotonic()

    left = asyncio.run(leave())
    unlimited._workers.threads.shutdown(wait=True)  # its thread ends when its process has
    assert time.monotonic() - left < 20  # alone, the schema takes minutes


def test_simple_schemas_compile_while_a_costly_one_runs(unlimited):
    async def both():
        costly = asyncio.ensure_future(unlimited.make(Client(60), TextForm("guided_json", schema=HUGE), 1))
        ordinary = [unlimited.make(Client(60), TextForm("guided_regex", pattern=p), 2) for p in ("a", "b")]
        assert [len(made) for made in await asyncio.gather(*ordinary)] == [2, 2]
        assert not costly.done()
        costly.cancel()

    asyncio.run(both())


def test_too_many_schemas_wait(unlimited, monkeypatch):
    monkeypatch.setattr(unlimited._workers, "_calls", _constraints.AT_A_TIME + 9)
    with pytest.raises(APIError, match="wait already") as caught:
        asyncio.run(unlimited.make(Client(60), TextForm("guided_regex", pattern="a"), 1))
    assert caught.value.status == 429
