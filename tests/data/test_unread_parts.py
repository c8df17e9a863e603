"""Parts of conversations that a chat template does not read are named once."""

import json
import warnings

import pytest

from transformer.data import Conversations, Preferences, Prompts, TokenizerConfig, prepare

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
ANSWER = {"role": "assistant", "content": "b"}


def warned(tmp_path, data, source, *rows):
    """Prepare rows with a template, and return the texts of the warnings."""
    (tmp_path / "t.jinja").write_text(source)
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {"template_path": str(tmp_path / "t.jinja"), "tokenizer": TokenizerConfig(kind="byte")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(data(path=str(tmp_path / "a.jsonl"), **options))
    return [str(one.message) for one in caught]


def with_entry(**entry):
    return {"messages": [{"role": "user", "content": "a", **entry}, ANSWER]}


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
UNREAD = {
    "name": (with_entry(name="Ann"), "messages.name"),
    "reasoning": ({"messages": [{"role": "user", "content": "a"}, {**ANSWER, "thinking": "hm"}]}, "messages.thinking"),
    "calls": (
        {"messages": [{"role": "user", "content": "a"}, {**ANSWER, "tool_calls": [CALL]}]},
        "messages.tool_calls",
    ),
    "switches": ({**with_entry(), "chat_template_kwargs": {"mode": "x"}}, "chat_template_kwargs.mode"),
    "tools": ({**with_entry(), "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_an_unread_part_is_named_once(tmp_path, case):
    row, name = UNREAD[case]
    (found,) = warned(tmp_path, Conversations, PLAIN, with_entry(), row, row, row)
    assert name in found
    assert "a.jsonl, line 2" in found
    assert "line 3" not in found


@pytest.mark.parametrize(
    ("source", "entry"),
    [
        (PLAIN.replace("{{ m.content }}", "{{ m.name }}{{ m.content }}"), {"name": "Ann"}),
        (PLAIN.replace("{{ m.content }}", "{{ m | tojson }}{{ m.content }}"), {"name": "Ann"}),
        (PLAIN.replace("{{ m.content }}", "{{ m['thinking'] }}{{ m.content }}"), {"reasoning_content": "hm"}),
        (PLAIN.replace("}}{%", "}}{% if m.role == 'assistant' %}{{ m.thinking }}{% endif %}{%"), {"reasoning": "hm"}),
        (PLAIN, {"name": None, "weight": 0}),
    ],
)
def test_a_part_that_is_read_is_not_named(tmp_path, source, entry):
    assert warned(tmp_path, Conversations, source, *[with_entry(**entry)] * 3) == []


@pytest.mark.parametrize("data", [Preferences, Prompts])
def test_unread_parts_are_reported_by_every_chat_data_kind(tmp_path, data):
    asked = {"role": "user", "content": "a", "name": "Ann"}
    row = {"prompt": [asked], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "c"}]}
    (found,) = warned(tmp_path, data, PLAIN, *[row] * 3)
    assert "messages.name" in found
