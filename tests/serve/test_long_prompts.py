"""Prompts of megabytes: they are refused before they are encoded, and others are answered meanwhile."""

import asyncio
import threading

import pytest
from chat_parts import write_chat_model
from inference_parts import write_models
from starlette.testclient import TestClient

from transformer.chat import _markers
from transformer.cli._services import ServiceSettings, make_service
from transformer.data.tokenizers import _pretrained
from transformer.inference import open_model
from transformer.serve import _bodies
from transformer.serve._errors import APIError

LONG = "the quick brown fox " * 100_000


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return write_models(folder) | {"chat": write_chat_model(folder / "chat")}


@pytest.fixture(scope="module")
def serve(directories):
    services = {}

    def get(kind):
        if kind not in services:
            options = {"slots": 1, "max_tokens": None if kind == "encoder" else 32, "api_key": None, "local_only": True}
            services[kind] = make_service(open_model(directories[kind]), ServiceSettings(**options))
        return services[kind]

    yield get
    for kind, service in services.items():
        if kind != "chat":  # its engine was not started
            service.close()


def client_of(service):
    return TestClient(service.application(), base_url="http://localhost")


def refuse_to_encode(monkeypatch, most):
    """Fail if the library is given a text of more than `most` characters."""
    for module in (_pretrained, _markers):

        def checked(library, given, special, encode=module.encode_one):
            assert len(given) <= most
            return encode(library, given, special)

        monkeypatch.setattr(module, "encode_one", checked)


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("chat", "/v1/completions", {"prompt": LONG}),
        ("chat", "/v1/completions", {"prompt": ["a", LONG]}),
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        (
            "chat",
            "/v1/attention",
            {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "a"}]},
        ),
        ("translator", "/v1/completions", {"prompt": LONG}),
        ("encoder", "/v1/embeddings", {"input": [LONG]}),
    ],
)
def test_a_long_text_is_rejected_before_encoding(serve, monkeypatch, kind, path, body):
    service = serve(kind)
    refuse_to_encode(monkeypatch, 2**16)
    response = client_of(service).post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert f"more than {service.most_tokens} tokens" in error["message"]
    assert error["code"] in ("context_length_exceeded", None if path == "/v1/attention" else "")
    assert len(error["message"]) < 300


def test_too_many_texts_in_one_request_are_rejected_before_encoding(serve, monkeypatch):
    service = serve("encoder")
    monkeypatch.setattr("transformer.serve._embeddings.MOST_INPUT_TOKENS", 100)
    refuse_to_encode(monkeypatch, 2**16)
    response = client_of(service).post(
        "/v1/embeddings", json={"input": ["the big cat sat on the small mat the"] * 2000}
    )
    assert response.status_code == 400
    assert "more than 100 tokens" in response.json()["error"]["message"]


class Client:
    """The request of a client that leaves after some seconds."""

    def __init__(self, seconds=60):
        self._seconds = seconds

    async def receive(self):
        await asyncio.sleep(self._seconds)
        return {"type": "http.disconnect"}


def test_the_queue_of_the_encoder_is_bounded(serve, monkeypatch):
    """A call beyond the bound is refused, one that its client leaves makes room, and the others are answered."""
    service, release = serve("chat"), threading.Event()
    monkeypatch.setattr(service.engine, "queue_size", 2)
    for name in ("_encoder", "_constraints"):
        monkeypatch.setattr(service, name, None)
    service.__post_init__()  # with the short queue

    def slow():
        release.wait(60)
        return [[7]]

    async def calls():
        first = [asyncio.ensure_future(service._encoded(Client(), slow, "prompt")) for _ in range(2)]
        left = asyncio.ensure_future(service._encoded(Client(0.05), slow, "prompt"))
        await asyncio.sleep(0)
        with pytest.raises(APIError, match="2 calls wait") as caught:
            await service._encoded(Client(), slow, "prompt")
        assert caught.value.status == 429
        with pytest.raises(APIError, match="the client has left"):
            await left
        last = asyncio.ensure_future(service._encoded(Client(), slow, "prompt"))
        await asyncio.sleep(0)
        release.set()
        assert await asyncio.gather(*first, last) == [[[7]]] * 3

    asyncio.run(calls())


def test_rejects_large_bodies(serve, monkeypatch):
    """A large one is parsed in a thread; one of many lists, which takes longest, is refused."""
    client = client_of(serve("chat"))
    parsed = []
    loads = _bodies.json.loads
    monkeypatch.setattr(
        _bodies.json, "loads", lambda given, **kw: parsed.append(threading.current_thread().name) or loads(given, **kw)
    )
    headers = {"Content-Type": "application/json"}
    body = b'{"prompt": [' + b"5," * _bodies.LARGE_BODY + b"5]}"
    response = client.post("/v1/completions", content=body, headers=headers)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert any(name.startswith("parser") for name in parsed)
    response = client.post("/v1/completions", content=b"[" * (_bodies.MOST_BRACKETS + 1), headers=headers)
    assert (response.status_code, "at most 250000" in response.text) == (413, True)
