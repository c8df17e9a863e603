"""The attention of an answer over HTTP: the page of `inspect`, and its limits."""

import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from attention_page_parts import data_of, weights_of
from chat_parts import write_chat_model
from starlette.testclient import TestClient

from transformer.chat import Chat
from transformer.cli._services import ServiceSettings, make_service
from transformer.inference import open_model
from transformer.inference._text_attention import sown_weights
from transformer.serve import _attention as module
from transformer.serve._attention import AnswerAttention
from transformer.viz import attention_maps
from transformer.viz._attention_weights import printable

KEY = "a-secret-key"
HEAD = {"authorization": f"Bearer {KEY}"}
MESSAGES = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Fine, thanks."}]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(write_chat_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def service(opened):
    service = make_service(opened, ServiceSettings(slots=1, max_tokens=128, api_key=KEY))
    yield service
    service.close()


@pytest.fixture
def client(service):
    return TestClient(service.application(), base_url="http://localhost", headers=HEAD)


@pytest.fixture(scope="module")
def conversation(opened):
    """The number of tokens before the answer, all tokens, and their attention maps."""
    chat = Chat(opened.model, opened.params, opened.tokenizer)
    before = chat.encode(MESSAGES[:1], add_generation_prompt=True).ids
    ids = [*before, *opened.tokenizer.encode("Fine, thanks.")]
    return len(before), ids, attention_maps(sown_weights(opened.model, opened.params, [ids]), opened.model.config)


@pytest.mark.programs(13, reason="the masks of a page are computed outside of jit")
def test_the_page_has_the_weights_of_the_conversation(client, opened, conversation):
    response = client.post("/v1/attention", json={"messages": MESSAGES})
    assert response.status_code == 200
    assert response.headers["content-security-policy"] == "sandbox"
    data = data_of(response.text)
    before, ids, expected = conversation
    assert data["words"]["decoder"] == [*map(printable, opened.tokenizer.tokens(ids))]
    assert data["writtenFrom"] == before
    (group,) = data["panels"][0]["groups"]
    assert len(group["layers"]) == len(expected)
    for layer, one in enumerate(expected):
        found = weights_of(data, "decoder", "self", layer)
        np.testing.assert_allclose(found, np.where(one.hidden, np.nan, one.weights), atol=3e-3)


@pytest.mark.programs(13, reason="the masks of a page are computed outside of jit")
def test_a_completion_without_a_template(client):
    data = data_of(client.post("/v1/attention", json={"prompt": "How are", "answer": " you?"}).text)
    assert 0 < data["writtenFrom"] < len(data["words"]["decoder"])


def test_stopping_the_server_cancels_waiting_requests():
    service = AnswerAttention(opened=None, chat=None, longest=1)
    started, end = threading.Event(), threading.Event()
    running = service._workers.threads.submit(lambda: (started.set(), end.wait(60)))
    waiting = service._workers.threads.submit(lambda: None)
    assert started.wait(60)
    service.close()
    assert waiting.cancelled()
    assert not running.done()
    end.set()


def test_an_answer_starts_at_the_first_token_that_differs():
    """The end of the prompt and the beginning of the answer may be one token, which belongs to the answer."""
    tokenizer = SimpleNamespace(encode_prompt=lambda text: [ord(c) for c in text.replace("lo", "\u1111")])
    service = AnswerAttention.__new__(AnswerAttention)
    service.chat, service.opened, service.longest = None, SimpleNamespace(tokenizer=tokenizer), 9
    assert service._tokens({"prompt": "hel", "answer": "lo!"}) == (3, [104, 101, 108, 0x1111, 33])
    assert service._tokens({"prompt": "hell", "answer": "o!"}) == (3, [104, 101, 108, 0x1111, 33])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"messages": MESSAGES[:1]}, "ends with the answer of the assistant"),
        ({"messages": "a"}, "ends with the answer of the assistant"),
        ({"prompt": "a"}, "prompt and answer must be texts"),
        ({"prompt": "a", "answer": ""}, "the answer has no tokens"),
        ({"message": []}, "unknown field 'message'"),
        ({"prompt": "a", "answer": "b " * 200}, "attention is shown for at most 128 tokens of this model"),
    ],
)
def test_unsupported_requests_are_one_line_errors(client, values, message):
    response = client.post("/v1/attention", json=values)
    assert response.status_code == 400
    error = response.json()["error"]["message"]
    assert message in error
    assert "\n" not in error


def test_the_endpoint_needs_the_key_and_limits_its_input(service, client, monkeypatch):
    assert client.post("/v1/attention", json={}, headers={"authorization": "Bearer wrong"}).status_code == 401
    monkeypatch.setattr(service.attention._workers, "_calls", module.MOST_WAITING + 1)
    assert client.post("/v1/attention", json={"messages": MESSAGES}).status_code == 429
    monkeypatch.setattr(service.attention._workers, "_calls", 0)
    config = service.attention.opened.model.config
    monkeypatch.setattr(module, "MOST_WEIGHTS", config.num_layers * config.num_heads * module.LENGTH_STEP**2)
    assert client.post("/v1/attention", json={"messages": MESSAGES}).status_code == 200  # as large as allowed
    monkeypatch.setattr(module, "LENGTH_STEP", 8)
    monkeypatch.setattr(module, "MOST_WEIGHTS", config.num_layers * config.num_heads * 21**2)
    message = client.post("/v1/attention", json={"messages": MESSAGES}).json()["error"]["message"]
    assert re.search(r"at most 16 tokens.*, got \d+", message)
