"""Prompts of text completions and of chats over HTTP: which tokens the engine gets."""

import pytest
from chat_parts import FAMILIES, tokenizer
from serve_parts import scripted_service
from starlette.testclient import TestClient

from transformer.chat._prompts import ChatPrompts

RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
INFILL = "<|fim_prefix|>def f(<|fim_suffix|>)<|fim_middle|>"


def posted(made, path, body):
    service, seen = scripted_service(made, [[6]] * 4, chat=ChatPrompts(made))
    client = TestClient(service.application(), base_url="http://localhost")
    answer = client.post(path, json=body)
    return answer.status_code, answer.json(), [list(request.prompt) for request in seen]


@pytest.mark.parametrize("family", ["qwen3", "smollm", "mistral"])
@pytest.mark.parametrize(
    "options", [{}, {"parse_special": False}, {"add_special_tokens": False}, {"parse_special": True}]
)
def test_special_tokens_in_a_completion_prompt_are_parsed(family, options):
    """By default, as in other servers; of each prompt of a call."""
    made = tokenizer(family)
    texts = [RENDERED, "[INST] Hi [/INST]</s>", "Hello"]
    status, answer, prompts = posted(made, "/v1/completions", {"prompt": texts, **options})
    assert status == 200
    assert prompts == [made.encode_prompt(text, **options) for text in texts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    parsed = not made.special_ids.isdisjoint([i for row in prompts[:2] for i in row])
    assert parsed == options.get("parse_special", True)


def test_markers_of_an_infilling_prompt_are_tokens(monkeypatch):
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    special, *rest = FAMILIES["smollm"]
    monkeypatch.setitem(FAMILIES, "smollm", ([*special, *names], *rest))
    made = tokenizer("smollm")
    _, _, ((first, *inside, last),) = posted(made, "/v1/completions", {"prompt": INFILL})
    assert made.tokens([first, last]) == [names[0], names[2]]
    assert made.tokens(inside).count(names[1]) == 1


def test_a_message_of_a_chat_stays_text():
    made = tokenizer("smollm")
    messages = [{"role": "user", "content": RENDERED}]
    _, _, (prompt,) = posted(made, "/v1/chat/completions", {"messages": messages})
    _, _, (plain,) = posted(made, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    assert [i for i in prompt if i in made.special_ids] == [i for i in plain if i in made.special_ids]


@pytest.mark.parametrize("field", ["parse_special", "add_special_tokens"])
def test_rejects_invalid_options(field):
    made = tokenizer("smollm")
    status, answer, prompts = posted(made, "/v1/completions", {"prompt": "a", field: "no"})
    assert (status, answer["error"]["param"], prompts) == (400, field, [])
    status, answer, prompts = posted(made, "/v1/chat/completions", {"messages": [], field: True})
    assert (status, answer["error"]["param"], prompts) == (400, field, [])
