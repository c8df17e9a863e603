"""Rendered conversations, token ids and descriptions of functions equal those of transformers, to the character."""

import contextlib
import enum
from datetime import datetime
from typing import Any, Literal

import pytest
from chat_parts import CONVERSATIONS, FAMILIES, files, weather

from transformer.chat import ChatEncoder, ChatTemplateError, find_template, function_schema
from transformer.data.tokenizers._pretrained import PretrainedTokenizer

pytestmark = pytest.mark.parity
OPTIONS = {
    "plain": {},
    "prompt": {"add_generation_prompt": True},
    "continued": {"continue_final_message": True},
    "tools": {"add_generation_prompt": True, "tools": [weather]},
    "switches": {"add_generation_prompt": True, "enable_thinking": False, "reasoning_effort": "high"},
    "documents": {"documents": [{"title": "One", "text": "a\nb"}, {"title": "Two", "text": "<c>"}]},
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    made = {}

    def load(family):
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            for name, content in files(family).items():
                (directory / name).write_bytes(content)
            made[family] = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
        return made[family]

    return load


def with_joined_texts(messages):
    """Return the messages for a template that writes the content unchanged; transformers does not do this."""
    return [
        {**one, "content": "\n".join(part["text"] for part in one["content"])}
        if isinstance(one["content"], list)
        else one
        for one in messages
    ]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_ids_equal_transformers(family, option, theirs):
    """Also the refusals: what raises an error there raises one here. Time is the day, which both read."""
    ours = PretrainedTokenizer(files(family))
    template = find_template(ours.files)
    encoder, reference = ChatEncoder(template, ours), theirs(family)
    compared = 0
    for messages in CONVERSATIONS.values():
        given = dict(OPTIONS[option])
        generated = "generation %}" in template.source and "continue_final_message" not in given
        asked = messages if family == "gemma3" else with_joined_texts(messages)
        # A template may fail without the content of a message with calls; then ours gets an empty one.
        filled = [{**one, "content": "" if one["content"] is None else one["content"]} for one in asked]
        expected = ids = None
        for messages_there in (asked, filled):
            with contextlib.suppress(Exception):  # many kinds of errors
                expected = reference.apply_chat_template(messages_there, tokenize=False, **given)
                ids = reference.apply_chat_template(
                    messages_there, tokenize=True, return_dict=True, return_assistant_tokens_mask=generated, **given
                )
                break
        if ids is None:
            with pytest.raises(ChatTemplateError):
                template.render(messages, **given)
            continue
        assert template.render(messages, **given) == expected
        tools, documents = given.pop("tools", None), given.pop("documents", None)
        prompt, final = given.pop("add_generation_prompt", False), given.pop("continue_final_message", False)
        encoded = encoder.encode(template.variables(messages, tools, documents, prompt, final, given), final)
        assert encoded.text == expected
        assert encoded.ids == ids["input_ids"]
        if generated:
            assert encoded.generated == [bool(flag) for flag in ids["assistant_masks"]]
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_markers_in_messages_are_text_as_in_transformers(family, theirs):
    """transformers has an option for this, which finds the same places. The spelling of a name may differ."""
    ours = PretrainedTokenizer(files(family))
    encoder, reference = ChatEncoder(find_template(ours.files), ours), theirs(family)
    name = FAMILIES[family][0][-1]
    messages = [{"role": "user", "content": f"Hello {name} world {name}"}]
    expected = reference.apply_chat_template(messages, sanitize_control_tokens=True, return_dict=False)
    got = encoder.encode(encoder.template.variables(messages, None, None, False, False, {})).ids
    special = ours.special_ids - {ours.unk_id}
    assert [i for i in got if i in special] == [i for i in expected if i in special]
    assert ours.decode(got) == ours.decode(expected)


TEMPLATES = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2, sort_keys=true) }}",
    "{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content[:3] ~ 1 ~ none }}",
    "{% macro m(x, y=2) %}[{{ x }}|{{ y }}]{% endmacro %}{{ m(1) }}{{ m(messages|length, y='é') }}",
    "{% for m in messages recursive %}{{ m.content }}{% if loop.depth < 3 %}{{ loop([m]) }}{% endif %}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{% else %}none{% endfor %}",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a * 2 + 1 %}{% endfor %}{{ ns.a }}",
    "  {% if true %}\n  x\n  {% endif %}\n{# c #}\n{%- set y %}block {{ 1 }}{% endset %}{{ y|upper }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ dict(a=1) }}{{ [1, 'x', none, true] }}",
    "{{ '%s-%05.1f' % ('a', 2) }}{{ '{:>5}|{x}'.format('b', x=3) }}",
    "{{ 7 // 2 }}{{ 2 ** 5 }}{{ ['a'] + ['b'] }}{{ 'ab' * 2 }}{{ -7 % 3 }}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'eq', 'user')|list|length }}",
    "{{ undefined_variable }}{{ messages[9] }}{{ missing is defined }}{{ '<b>'|e }}{{ 'a b'|title }}",
    "{% call(x) wrap() %}{{ x }}{% endcall %}{% macro wrap() %}<{{ caller('i') }}>{% endmacro %}",
    "{% filter upper %}abc{{ messages[0].role }}{% endfilter %}{% raw %}{{ x }}{% endraw %}",
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_template_language_equals_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    from transformer.chat import ChatTemplate

    messages = CONVERSATIONS["three"]
    try:
        (expected,), _ = render_jinja_template([messages], chat_template=source)
    except Exception:  # many kinds of errors
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source).render(messages)
    else:
        assert ChatTemplate(source).render(messages) == expected
    assert datetime.now().year > 2000


class Color(enum.Enum):
    RED = "red"
    BLUE = 2


def search(
    query: str,
    limit: int | None,
    kinds: list[Literal["a", "b"]],
    color: Color = Color.RED,
    pair: tuple[int, str] = (1, ""),
) -> dict[str, list[int]]:
    """
    Search the archive.

    It is large.

    Args:
        query: what to search:
            two lines
        limit: how many
        kinds: which kinds
        color: the color (choices: ["red ", 2])
        pair: a pair: of values
    Returns:
        the results
    Raises:
        ValueError: never
    """


def anything(value: Any, mixed: int | str | None = None, nested: dict[str, float] | list[int] = ()) -> object:
    """Do it.

    Args:
        value: any value
        mixed: mixed

        nested: nested
    """


def nothing() -> None:
    """Only a summary"""


class Tools:
    def method(self, x: bool) -> bool:
        """Invert.

        Args:
            x: value
        """


@pytest.mark.parametrize("function", [weather, search, anything, nothing, Tools().method])
def test_function_schemas_equal_transformers(function):
    from transformers.utils import get_json_schema

    assert function_schema(function) == get_json_schema(function)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_ids_equal_transformers(family, theirs):
    """A text with special tokens that is continued unchanged: the ids that a call of the tokenizer returns."""
    ours, reference = PretrainedTokenizer(files(family)), theirs(family)
    special = "".join(reference.all_special_tokens)
    for text in (special, f"Hello {special} world", "a<|im_end|>\n<s> b", "def f(<|fim_suffix|>)"):
        assert ours.encode_prompt(text) == reference(text)["input_ids"]
        unadded = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_prompt(text, add_special_tokens=False) == unadded
