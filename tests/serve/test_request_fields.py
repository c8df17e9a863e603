"""Fields of a call over HTTP reach the requests of the engine, whose slots are scripted: nothing is compiled."""

import json

import pytest
from chat_parts import write_chat_model
from scripted_slots import ScriptedSlots
from starlette.testclient import TestClient

from transformer.chat._prompts import ChatPrompts
from transformer.cli._services import ServiceSettings, make_service
from transformer.inference import open_model
from transformer.serve import _bodies as bodies
from transformer.serve._batch import read_batch

POSITIONS, N = 128, 3
MESSAGES = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{{ messages[0].content }}{{ mood }}{{ reasoning_effort }}{% for tool in tools or [] %}{{ tool }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
RECOMMENDED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A model that recommends a sampling, end tokens, and tokens that are not generated."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    fields = {"eos_token_id": [2, 299], "suppress_tokens": [7], "bad_words_ids": [[8], [9, 10]]}
    return open_model(write_chat_model(folder, **RECOMMENDED, **fields))


@pytest.fixture(scope="module")
def service(opened):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer.serve._engine.Slots", ScriptedSlots)
        made = make_service(opened, ServiceSettings(slots=4, max_tokens=POSITIONS))
        made.start()
        yield made
        made.close()


@pytest.fixture
def call(service, monkeypatch):
    """Make a call with these fields; return its answer and the requests of the engine."""
    client, seen, submit = TestClient(service.application(), base_url="http://localhost"), [], service.engine.submit
    monkeypatch.setattr(
        service.engine, "submit", lambda given, deliver: (seen.extend(given), submit(given, deliver))[1]
    )

    def made(is_chat=True, **body):
        seen.clear()
        path, prompt = ("/v1/chat/completions", "messages") if is_chat else ("/v1/completions", "prompt")
        answer = client.post(path, json={prompt: MESSAGES if is_chat else "Hello world", **body})
        assert answer.status_code == 200, answer.text
        return answer.json(), list(seen)

    return made


SAMPLING = {"temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.25}
SAMPLING |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize(("name", "value"), SAMPLING.items())
def test_each_sampling_field_changes_only_its_setting(call, service, is_chat, name, value):
    _, (request,) = call(is_chat, **{name: value, "max_tokens": 2})
    for other in SAMPLING:
        assert getattr(request.sampling, other) == (value if other == name else getattr(service.sampling, other))


def test_recommended_sampling_end_tokens_and_suppressed_tokens_are_used(call, service):
    _, (request,) = call(max_tokens=2)
    assert {name: getattr(request.sampling, name) for name in list(RECOMMENDED)[1:]} == dict(
        list(RECOMMENDED.items())[1:]
    )
    assert set(request.eos_ids) >= {2, 299}
    assert service.suppress == (7, 8)
    assert service.engine._scheduler._suppressed.tolist() == [7, 8]
    assert service.engine._device.suppressed.tolist() == [7, 8]


def test_a_filter_of_a_greedy_model_samples(call, service, monkeypatch):
    greedy = bodies.Sampling(temperature=0.0)
    monkeypatch.setattr(service, "sampling", greedy)
    assert call(max_tokens=2)[1][0].sampling.temperature == 0
    assert call(max_tokens=2, top_p=0.5)[1][0].sampling.temperature == 1
    assert call(max_tokens=2, top_p=0.5, temperature=0.2)[1][0].sampling.temperature == 0.2
    assert call(max_tokens=2, top_k=-1, temperature=0.2)[1][0].sampling.top_k is None


@pytest.mark.parametrize("is_chat", [True, False])
def test_each_of_n_texts_has_a_seed(call, is_chat):
    answer, requests = call(is_chat, n=N, seed=2**32 - 2, max_tokens=4)
    assert [request.seed for request in requests] == [2**32 - 2, 2**32 - 1, 0]
    assert len({json.dumps(choice.get("message") or choice["text"]) for choice in answer["choices"]}) == N
    assert call(is_chat, n=N, seed=-2, max_tokens=4)[0]["choices"] == answer["choices"]
    (first,), (second,) = (call(is_chat, max_tokens=1)[1] for _ in range(2))
    assert first.seed != second.seed, "without a seed, it is random"


def test_several_prompts_return_n_texts_each(call, opened):
    texts = ["Hello", "world"]
    answer, requests = call(False, prompt=texts, n=2, seed=5, max_tokens=3)
    rows = [list(opened.tokenizer.encode_source(text)) for text in texts]
    assert [(list(request.prompt), request.seed) for request in requests] == [
        (rows[0], 5),
        (rows[0], 6),
        (rows[1], 5),
        (rows[1], 6),
    ]
    assert answer["usage"] == {
        "prompt_tokens": sum(map(len, rows)),
        "completion_tokens": 12,
        "total_tokens": sum(map(len, rows)) + 12,
    }


@pytest.mark.parametrize("is_chat", [True, False])
def test_end_tokens_limits_and_log_probabilities_reach_the_engine(call, service, is_chat):
    _, (request,) = call(is_chat, max_tokens=2, stop=["ab", "c", "d"], stop_token_ids=[40, 41, 2])
    assert request.stop == ("ab", "c", "d")
    assert set(request.eos_ids) == {*service.eos_ids, 40, 41}
    assert request.is_reply == is_chat
    assert request.top == 0
    logprobs = {"logprobs": True, "top_logprobs": 4} if is_chat else {"logprobs": 4}
    answer, (request,) = call(is_chat, max_tokens=3, **logprobs)
    assert (request.top, request.max_tokens) == (4, 3)
    found = answer["choices"][0]["logprobs"]
    tops = [one["top_logprobs"] for one in found["content"]] if is_chat else found["top_logprobs"]
    assert len(tops) == 3
    assert all(len(top) > 1 for top in tops)
    zero = {"logprobs": True} if is_chat else {"logprobs": 0}
    answer, (request,) = call(is_chat, max_tokens=3, **zero)
    assert request.top == 0
    assert answer["choices"][0]["logprobs"] is not None
    _, (request,) = call(is_chat, max_tokens=10**6, stop_token_ids=[])
    assert request.max_tokens == POSITIONS - len(request.prompt)
    _, (request,) = call(is_chat)
    assert request.max_tokens == (POSITIONS - len(request.prompt) if is_chat else 16)


def test_max_completion_tokens_overrides_max_tokens(call):
    assert call(max_completion_tokens=3)[1][0].max_tokens == 3
    assert call(max_completion_tokens=3, max_tokens=5)[1][0].max_tokens == 3


def test_each_of_n_texts_has_a_constraint(call):
    """A constraint is used up by its text."""
    pytest.importorskip("llguidance")
    answer, requests = call(False, n=N, guided_regex="[a-f]{4}", max_tokens=9, seed=1)
    constraints = [request.constraint for request in requests]
    assert len(set(map(id, constraints))) == N
    assert None not in constraints
    _, requests = call(False, prompt=["a", "b"], n=2, guided_regex="[a-f]{4}", max_tokens=9)
    assert len({id(request.constraint) for request in requests}) == 4
    assert len(answer["choices"]) == N


def test_tools_and_variables_reach_the_template(call, service, opened, monkeypatch):
    chat = ChatPrompts(opened.tokenizer, TEMPLATE)
    monkeypatch.setattr(service, "chat", chat)

    def prompt(**body):
        return opened.tokenizer.decode(call(max_tokens=1, **body)[1][0].prompt)

    assert prompt() == "Hello"
    assert prompt(reasoning_effort="low", chat_template_kwargs={"mood": " sad"}) == "Hello sadlow"
    assert "weather" in prompt(tools=TOOLS)
    assert prompt(tools=TOOLS, tool_choice="none") == "Hello"


def test_the_seed_of_a_batch_line_follows_from_its_id(tmp_path):
    """So that a repeated run gives the same texts, and equal bodies different ones."""

    def seeds(**body):
        line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a", **body}}
        (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"custom_id": i, **line}) + "\n" for i in "ab"))
        with open(tmp_path / "lines.jsonl", "rb") as file:
            return [json.loads(request.body)["seed"] for request in read_batch(file, "lines.jsonl")[0]]

    first, second = seeds()
    assert first != second
    assert seeds(max_tokens=9) == [first, second]
    assert seeds(seed=3) == [3, 3]


def test_every_request_field_has_a_test():
    """A new field of a body needs a test that it reaches the engine, or the place where it acts."""
    tested = {*SAMPLING, "n", "seed", "stop", "stop_token_ids", "max_tokens", "max_completion_tokens", "logprobs"}
    tested |= {"top_logprobs", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs", "guided_regex"}
    elsewhere = {"model", "messages", "prompt", "stream", "stream_options", "response_format", "guided_json"}
    elsewhere |= {"parse_special", "add_special_tokens"}
    assert tested | elsewhere == bodies._CHAT | bodies._TEXT
