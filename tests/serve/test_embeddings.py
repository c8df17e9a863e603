"""Embeddings over HTTP with the client of OpenAI: the vectors of `embed text`."""

import base64
import json
import threading
import time
import warnings

import numpy as np
import openai
import pytest
from inference_parts import write_models
from starlette.testclient import TestClient

from transformer.__main__ import main
from transformer.cli._services import ServiceSettings, make_service
from transformer.config._checks import ConfigError
from transformer.inference import SentenceSettings, embed, open_model

TEXTS = ["the big cat sat on the small mat", "a dog ran", "the tree"]
POOLING = {"pooling_mode_lasttoken": True}
MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Tiny models; the causal one is an embedding model with last-token pooling, as Qwen3-Embedding."""
    made = write_models(tmp_path_factory.mktemp("weights"))
    (made["writer"] / "1_Pooling").mkdir()
    (made["writer"] / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (made["writer"] / "modules.json").write_text(json.dumps(MODULES))
    return made


def serve(directory, **options):
    return make_service(open_model(directory), ServiceSettings(slots=1, **{"max_tokens": None, **options}))


def client_of(service):
    http = TestClient(service.application(), base_url="http://localhost", raise_server_exceptions=False)
    return openai.OpenAI(base_url="http://localhost/v1", api_key="unused", max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def encoder(directories):
    service = serve(directories["encoder"])
    service.warm_up(lambda done, total: None)
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(encoder):
    return client_of(encoder)


def test_vectors_equal_the_embed_command(client, directories, capsys):
    """Also those of the command, which prints seven decimals. The client asks for base64 unless told otherwise."""
    wanted = embed(open_model(directories["encoder"]), TEXTS)
    for format in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model="encoder", input=TEXTS, **format)
        assert [one.index for one in found.data] == [0, 1, 2]
        np.testing.assert_array_equal(np.float32([one.embedding for one in found.data]), wanted)
    assert (
        main(["embed", "text", str(directories["encoder"]), *(word for text in TEXTS for word in ("--text", text))])
        == 0
    )
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose([one.embedding for one in found.data], printed, atol=1e-7)


def test_base64_is_float32(client):
    answer = client._client.post("/v1/embeddings", json={"input": "a dog ran", "encoding_format": "base64"}).json()
    numbers = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    floats = client.embeddings.create(model="encoder", input="a dog ran", encoding_format="float")
    np.testing.assert_array_equal(numbers, np.float32(floats.data[0].embedding))


def test_sentence_transformers_settings_are_applied(directories):
    """A causal model: the last token, and vectors of length 1. It has no completions."""
    service = serve(directories["writer"])
    found = client_of(service).embeddings.create(model="writer", input=TEXTS, encoding_format="float")
    vectors = np.float32([one.embedding for one in found.data])
    settings = SentenceSettings(pooling="last", normalize=True)
    np.testing.assert_array_equal(vectors, embed(open_model(directories["writer"]), TEXTS, settings))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    with pytest.raises(openai.NotFoundError):
        client_of(service).completions.create(model="writer", prompt="a")
    service.close()


def test_accepts_token_ids_and_reports_usage(client, directories):
    tokenizer = open_model(directories["encoder"]).tokenizer
    rows = [list(tokenizer.encode_source(text)) for text in TEXTS]
    by_text = client.embeddings.create(model="encoder", input=TEXTS)
    by_ids = client.embeddings.create(model="encoder", input=rows)
    assert [one.embedding for one in by_text.data] == [one.embedding for one in by_ids.data]
    count = sum(map(len, rows))
    assert by_text.usage.prompt_tokens == by_text.usage.total_tokens == by_ids.usage.prompt_tokens == count
    alone = client.embeddings.create(model="encoder", input=rows[0])
    np.testing.assert_allclose(alone.data[0].embedding, by_ids.data[0].embedding, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "param", "message"),
    [
        ({"input": []}, "input", "must be a text"),
        ({"input": [["a"]]}, "input", "must be a text"),
        ({"input": [[10**9]]}, "input", "token ids must be from 0"),
        ({"input": [[-1]]}, "input", "token ids must be from 0"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 texts"),
        ({"input": ["a", "the cat " * 300]}, "input", "text 1 has 602 tokens, but a text can have at most"),
        ({"encoding_format": "int8"}, "encoding_format", r"base64"),
        ({"dimensions": 3}, "dimensions", "the size of this model"),
        ({"extra_body": {"inputs": "a"}}, "inputs", r"'input'?"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_rejects_invalid_fields(client, changed, param, message):
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.embeddings.create(**{"model": "encoder", "input": "a", **changed})
    assert caught.value.status_code in (400, 404)
    assert caught.value.param == param
    assert "/" not in caught.value.body["message"]


def test_a_full_queue_is_429(encoder, client, monkeypatch):
    """One call computes, one waits; the third is refused."""
    computing, proceed = threading.Event(), threading.Event()
    vectors = encoder._vectors

    def slow(rows):
        computing.set()
        assert proceed.wait(60)
        return vectors(rows)

    monkeypatch.setattr(encoder, "_vectors", slow)
    monkeypatch.setattr(encoder, "queue", 1)
    done = []
    ask = lambda: done.append(client.embeddings.create(model="encoder", input="a"))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert computing.wait(60)
    threads[1].start()
    deadline = time.monotonic() + 30
    while encoder.load.waiting < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(openai.RateLimitError) as caught:
        client.with_options(timeout=5).embeddings.create(model="encoder", input="a")
    assert caught.value.response.headers["retry-after"] == "1"
    text = client._client.get("/metrics").text
    assert "transformer_requests_running 1\n" in text
    assert "transformer_requests_waiting 1\n" in text
    proceed.set()
    for thread in threads:
        thread.join()
    assert len(done) == 2
    assert encoder.load.running == 0
    assert client.embeddings.create(model="encoder", input="a").data


def test_waiting_requests_are_batched(encoder, client, monkeypatch):
    """Eight calls need two passes; each gets the vectors of a single call, even if one of them is invalid."""
    inputs = [["the tree"], "a dog ran", TEXTS, "the cat " * 5, ["the mat", "a tree"], "big cat", [["a"]], TEXTS[0]]
    inputs[6] = [[10**9]]
    alone = [None if given == [[10**9]] else client.embeddings.create(model="encoder", input=given) for given in inputs]
    computing, proceed, passes, found = threading.Event(), threading.Event(), [], {}
    vectors = encoder._vectors

    def slow(rows):
        passes.append(len(rows))
        computing.set()
        assert proceed.wait(60)
        return vectors(rows)

    def ask(number):
        try:
            found[number] = client.embeddings.create(model="encoder", input=inputs[number])
        except openai.BadRequestError as error:
            found[number] = error

    monkeypatch.setattr(encoder, "_vectors", slow)
    threads = [threading.Thread(target=ask, args=[number]) for number in range(len(inputs))]
    threads[0].start()
    assert computing.wait(60)
    for thread in threads[1:]:
        thread.start()
    deadline = time.monotonic() + 30
    while encoder.load.waiting < len(inputs) - 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    proceed.set()
    for thread in threads:
        thread.join()
    assert passes == [1, 1 + 3 + 1 + 2 + 1 + 1]
    assert "token ids must be from 0" in str(found.pop(6))
    assert encoder.load.waiting == encoder.load.running == 0
    for number, answer in found.items():
        assert answer.usage == alone[number].usage
        assert len(answer.data) == len(alone[number].data)
        for one, other in zip(answer.data, alone[number].data, strict=True):
            np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-5)


def test_non_finite_values_are_an_error(client, encoder, monkeypatch):
    """Status 500, without the path that the error of `embed` names."""
    monkeypatch.setattr("transformer.serve._embeddings.embed_encoded", lambda *given: embed_nothing())
    with pytest.raises(openai.InternalServerError, match="values that are not finite") as caught:
        client.embeddings.create(model="encoder", input="a")
    assert "/" not in caught.value.body["message"]


def embed_nothing():
    raise ValueError("the weights in /some/path")


def test_a_long_text_adds_no_line_to_the_log(client):
    """`embed` warns when it truncates; a client must not be able to fill the log."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="encoder", input="the cat " * 300)


def test_a_batch_of_embeddings(directories, tmp_path, capsys):
    body = {"input": TEXTS, "encoding_format": "float"}
    (tmp_path / "requests.jsonl").write_text(json.dumps({"custom_id": "a", "url": "/v1/embeddings", "body": body}))
    assert main(["batch", str(directories["encoder"]), str(tmp_path / "requests.jsonl")]) == 0
    (answer,) = map(json.loads, capsys.readouterr().out.splitlines())
    found = [one["embedding"] for one in answer["response"]["body"]["data"]]
    np.testing.assert_array_equal(np.float32(found), embed(open_model(directories["encoder"]), TEXTS))


def test_limits_the_input(directories):
    with pytest.raises(ConfigError, match="--max-tokens"):
        serve(directories["encoder"], max_tokens=10**6)
