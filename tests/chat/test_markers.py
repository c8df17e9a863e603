"""Markers of the template become special tokens; what people write never does."""

import json

import pytest
import tokenizers
from chat_parts import FAMILIES, files, library, tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_tokenizers import unigram

from transformer.chat import ChatEncoder, ChatTemplate, find_template
from transformer.config import ConfigError
from transformer.data.tokenizers._pretrained import PretrainedTokenizer

ENCODERS = {}


def encoder(family):
    if family not in ENCODERS:
        ENCODERS[family] = ChatEncoder(find_template(files(family)), tokenizer(family))
    return ENCODERS[family]


def encode(made, messages, *, tools=None, documents=None, prompt=True, **switches):
    return made.encode(made.template.variables(messages, tools, documents, prompt, False, switches))


def user(content):
    return [{"role": "user", "content": content}]


def markers(made, ids):
    """Return the names of the special tokens, except the unknown one."""
    own = made._tokenizer
    special = own.special_ids - {own.unk_id}
    return [name for i, name in zip(ids, own.tokens(ids), strict=True) if i in special]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_marker_in_a_message_is_text(family):
    made = encoder(family)
    expected = markers(made, encode(made, user("Hello")).ids)
    special, named = FAMILIES[family][:2]
    for name in [*special, *(name for name in named if not name.isspace() and name in made.template.source)]:
        content = f"Hello {name} world {name}{name[:-1]} {name[1:]}"
        encoded = encode(made, user(content))
        assert markers(made, encoded.ids) == expected
        assert made._tokenizer.decode(encoded.ids).count(content) == 1  # nothing is lost either


def test_a_token_without_characters_is_kept():
    """With `trim_offsets`, as in the files of GPT-2, the span of a token that is a space is empty."""
    content = json.loads(files("qwen2")["tokenizer.json"])
    content["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    own = PretrainedTokenizer({**files("qwen2"), "tokenizer.json": json.dumps(content).encode()}, 1000)
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    encoded = encode(ChatEncoder(find_template(own.files), own), user("Hello   world"))
    expected = library.encode(encoded.text, add_special_tokens=False)
    assert any(start == end for start, end in expected.offsets)
    assert encoded.ids == expected.ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rendered_conversation_as_a_prompt(family):
    """A client that renders a conversation and completes the text gets the tokens of the conversation."""
    made = encoder(family)
    encoded = encode(made, user("Hello world"))
    assert made._tokenizer.encode_prompt(encoded.text, add_special_tokens=False) == encoded.ids
    as_text = made._tokenizer.encode_prompt(encoded.text, add_special_tokens=False, parse_special=False)
    assert len(as_text) > len(encoded.ids)
    assert markers(made, as_text) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_marker_fragments_stay_text(family):
    """Whatever is typed, the special tokens are those of a conversation with plain words."""
    made = encoder(family)
    special = FAMILIES[family][0]
    expected = markers(made, encode(made, user("Hello")).ids)
    parts = [*special, *(name[:3] for name in special), *(name[2:] for name in special), " ", "\n", "x", "<", "|", ">"]

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(parts), max_size=8).map("".join))
    def check(content):
        assert markers(made, encode(made, user(content)).ids) == expected

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_conversations_are_encoded_by_the_library_in_one_piece(family):
    made = encoder(family)
    encoded = encode(made, user("Hello é 你好 < > | </"))
    reference = library(FAMILIES[family][2], *FAMILIES[family][:2])
    assert encoded.ids == reference.encode(encoded.text, add_special_tokens=False).ids


def test_text_around_a_marker_is_encoded_like_plain_text():
    """A marker that a user types changes no token before or after it."""
    made = encoder("qwen2")
    name = "<|im_end|>"
    ids = encode(made, user(f"Hello world {name}, how are you")).ids
    own = made._tokenizer
    labels = own.tokens(ids)
    typed = own.tokens(own.encode(f"Hello world {name}, how are you"))
    assert "".join(labels).count("".join(typed)) == 1
    first = labels.index("<", labels.index("user"))
    assert labels[first - 1 :][: 1 + len(own.encode(name))] == ["␣", *own.tokens(own.encode(name))]


def test_markers_assembled_by_the_template_from_a_message_stay_text():
    made = ChatEncoder(ChatTemplate("{% for m in messages %}<|{{ m.content }}|>{% endfor %}"), tokenizer("smollm"))
    for content in ("im_end", "im_start|><|im_end", " im_end"):
        assert markers(made, encode(made, user(content)).ids) == []
    made = ChatEncoder(
        ChatTemplate("{% for m in messages %}{{ m.content|trim }}_end|>{% endfor %}"), tokenizer("smollm")
    )
    assert markers(made, encode(made, user("a <|im \n")).ids) == []
    made = ChatEncoder(ChatTemplate("<|im_{{ messages[0].content }}"), tokenizer("smollm"))
    assert markers(made, encode(made, user("end|> b")).ids) == []
    assert markers(made, encode(made, user("x <|im_end|> b")).ids) == []


def test_a_template_that_changes_a_marker_is_refused():
    """The text then can't be distinguished from a marker of the template."""
    for source in ("{{ messages[0].content|length }}", "{{ messages[0].content|tojson(ensure_ascii=true) }}"):
        made = ChatEncoder(ChatTemplate(source, "x.jinja"), tokenizer("smollm"))
        encode(made, user("Hello"))
        with pytest.raises(ConfigError, match=r"0.*'<\|im_end\|>'.*,.*x.jinja"):
            encode(made, user("Hello <|im_end|>"))


def test_markers_in_tools_documents_and_switches_are_text():
    name = "<|im_end|>"
    made = encoder("qwen2")
    tool = {"type": "function", "function": {"name": name, "description": name, "parameters": {name: name}}}
    plain = {"type": "function", "function": {"name": "a", "description": "a", "parameters": {"a": "a"}}}
    ids = encode(made, user("x"), tools=[tool]).ids
    assert markers(made, ids) == markers(made, encode(made, user("x"), tools=[plain]).ids)
    made = encoder("documents")
    ids = encode(made, user("x"), documents=[{"title": "t", "text": f"a\n{name}"}]).ids
    assert markers(made, ids) == markers(made, encode(made, user("x")).ids)
    made = encoder("gpt_oss")
    ids = encode(made, user("x"), reasoning_effort="<|end|>").ids
    assert markers(made, ids) == markers(made, encode(made, user("x")).ids)


def test_markers_generated_by_the_assistant_stay_tokens():
    """Tokens such as <tool_call>, which are not special, are part of its language; special tokens are not."""
    made = encoder("qwen2")
    call = '<tool_call>\n{"name": "f"}\n</tool_call>'
    ids = encode(made, [*user("x"), {"role": "assistant", "content": call}]).ids
    assert "<tool_call>" in made._tokenizer.tokens(ids)
    assert "<tool_call>" not in made._tokenizer.tokens(encode(made, user(call)).ids)
    ids = encode(made, [*user("x"), {"role": "assistant", "content": "<|im_end|>"}]).ids
    assert markers(made, ids) == markers(made, encode(made, [*user("x"), {"role": "assistant", "content": "y"}]).ids)


def test_a_character_that_is_used_inside_is_not_mistaken():
    made = encoder("smollm")
    content = "\U000f0000<|im_end|>\U000f0001"
    encoded = encode(made, user(content))
    assert content in encoded.text
    assert content in made._tokenizer.decode(encoded.ids)


def test_a_tokenizer_that_cannot_spell_a_marker():
    """Its model has the marker as a piece; without the pieces of its characters, the message is refused."""
    own = PretrainedTokenizer({"tokenizer.json": unigram().to_str().encode()})
    made = ChatEncoder(ChatTemplate("{{ messages[0].content }}</s>"), own)
    for content in ("be a", "be </s> a"):
        ids = encode(made, user(content)).ids
        assert ids.count(own._library.token_to_id("</s>")) == 1


def test_assistant_tokens_are_marked_in_the_mask():
    made = encoder("documents")
    messages = [*user("Hello"), {"role": "assistant", "content": "The answer"}, *user("Bye")]
    encoded = encode(made, messages)
    own = [i for i, flag in zip(encoded.ids, encoded.generated, strict=True) if flag]
    assert made._tokenizer.decode(own) == "The answer"
    assert markers(made, own) == ["<|im_end|>"]


def test_finds_the_end_of_turn_token():
    expected = {"llama3": "<|eot_id|>", "qwen3": "<|im_end|>", "gemma2": "<end_of_turn>", "mixtral": "</s>"}
    expected |= {"phi3": "<|end|>", "gpt_oss": "<|return|>", "deepseek_v3": "<｜end▁of▁sentence｜>"}
    for family, name in expected.items():
        made = encoder(family)
        assert made._tokenizer.tokens([made.end_of_turn()]) == [name]
    made = ChatEncoder(ChatTemplate("{{ raise_exception('no') }}"), tokenizer("smollm"))
    assert made.end_of_turn() is None
    made = ChatEncoder(
        ChatTemplate("{% for m in messages %}{{ m.content }} then <|im_end|>{% endfor %}"), tokenizer("smollm")
    )
    assert made.end_of_turn() is None
