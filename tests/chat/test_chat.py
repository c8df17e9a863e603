"""`Chat`: replies equal those of `generate`, pieces equal replies, and conversations stay within the context."""

import json

import pytest
from chat_parts import FAMILIES, library, tokenizer, write_chat_model

from transformer.chat import Chat, ChatTemplate, ChatTemplateError, default_sampling
from transformer.chat._channels import Channels
from transformer.config import ConfigError
from transformer.data import TokenizerConfig
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.data.tokenizers._pretrained import PretrainedTokenizer, load_pretrained_tokenizer
from transformer.generate import Sampling, generate
from transformer.inference import export, open_model

HELLO = [{"role": "user", "content": "Hello <|im_end|>"}]
SOME = {"max_new_tokens": 12, "sampling": Sampling(), "seed": 3}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(write_chat_model(tmp_path_factory.mktemp("models") / "smollm"))


@pytest.fixture(scope="module")
def chat(opened):
    return Chat(opened.model, opened.params, opened.tokenizer)


@pytest.fixture(scope="module")
def reply(chat):
    return chat.reply(HELLO, **SOME)


def test_a_reply_equals_the_output_of_generate(chat, opened, reply):
    ids = chat.encode(HELLO, add_generation_prompt=True).ids
    options = {"max_new_tokens": 12, "sampling": Sampling(), "seed": 3, "eos_id": chat.eos_ids}
    assert reply.tokens == generate(opened.model, opened.params, [ids], **options)[0]
    assert reply.text == str(reply) == opened.tokenizer.decode(reply.tokens)
    assert reply.finish == ("end" if len(reply.tokens) < 12 else "length")
    assert len(reply.log_probabilities) == len(reply.tokens)
    assert reply.message == {"role": "assistant", "content": reply.text}


def test_joined_stream_chunks_equal_the_reply(chat, reply):
    stream = chat.stream(HELLO, **SOME)
    assert "".join(stream) == reply.text == stream.reply.text
    partial = chat.stream(HELLO, **SOME)
    first = next(partial)
    assert (partial.reply.text, partial.reply.finish) == (first, "interrupted")


@pytest.mark.programs(10, reason="two conversations are read in parts of other lengths")
def test_a_second_turn_equals_a_new_conversation(chat, opened, reply):
    turns = [*HELLO, reply.message, {"role": "user", "content": "And then?"}]
    fresh = Chat(opened.model, opened.params, opened.tokenizer)
    assert chat.reply(turns, **SOME).tokens == fresh.reply(turns, **SOME).tokens


def test_several_replies(chat):
    found = chat.replies(HELLO, samples=3, **SOME)
    assert len({reply.text for reply in found}) == 3
    assert found[1] == chat.reply(HELLO, **{**SOME, "seed": 4})
    with pytest.raises(ConfigError, match=r"samples.*1"):
        chat.replies(HELLO, samples=0)


def test_seeds_of_replies_wrap_around(monkeypatch):
    monkeypatch.setattr(Chat, "reply", lambda self, messages, seed: seed)
    assert Chat.replies(object.__new__(Chat), HELLO, samples=3, seed=2**32 - 2) == [2**32 - 2, 2**32 - 1, 0]


def test_a_stop_string_ends_a_reply(chat, reply):
    whole = reply.text
    stop = whole[4:6]
    reply = chat.reply(HELLO, stop=["not in the text", stop], **SOME)
    assert (reply.text, reply.finish) == (whole[: whole.index(stop)], "stop")


def test_the_end_of_turn_ends_a_reply(opened):
    """Also if only the template names it: the tokenizer's files know the end of a document."""
    files = dict(opened.tokenizer.files)
    config = json.loads(files["tokenizer_config.json"])
    files["tokenizer_config.json"] = json.dumps({**config, "eos_token": "<|endoftext|>"}).encode()
    chat = Chat(opened.model, opened.params, PretrainedTokenizer(files, opened.tokenizer.vocab_size))
    assert chat.tokenizer.tokens(chat.eos_ids) == ["<|endoftext|>", "<|im_end|>"]
    files["generation_config.json"] = json.dumps({"eos_token_id": chat.eos_ids[:1]}).encode()
    chat = Chat(opened.model, opened.params, PretrainedTokenizer(files, opened.tokenizer.vocab_size))
    assert chat.tokenizer.tokens(chat.eos_ids) == ["<|endoftext|>"]


@pytest.mark.programs(9, reason="a conversation is read and continued for the first time")
def test_the_context_length_limits_a_reply(opened):
    ids = Chat(opened.model, opened.params, opened.tokenizer).encode(HELLO, add_generation_prompt=True).ids
    chat = Chat(opened.model, opened.params, opened.tokenizer, context=len(ids) + 3)
    assert len(chat.reply(HELLO, **SOME).tokens) <= 3
    with pytest.raises(ConfigError, match=rf"conversation.*{len(ids)}"):
        Chat(opened.model, opened.params, opened.tokenizer, context=len(ids)).reply(HELLO)


@pytest.mark.programs(10, reason="a conversation is read and continued, with and without suppressed tokens")
def test_suppressed_tokens_are_not_generated(opened):
    first = Chat(opened.model, opened.params, opened.tokenizer).reply(HELLO, max_new_tokens=1).tokens
    chat = Chat(opened.model, opened.params, opened.tokenizer, suppress=first)
    assert chat.reply(HELLO, max_new_tokens=5).tokens[0] != first[0]


def test_a_final_message_is_continued(chat):
    messages = [*HELLO, {"role": "assistant", "content": "The answer"}]
    text = chat.encode(messages, continue_final_message=True).text
    assert text.endswith("assistant\nThe answer")
    assert chat.reply(messages, continue_final_message=True, max_new_tokens=2).tokens


def test_uses_the_recommended_sampling_of_the_model():
    def of(**values):
        return default_sampling({"generation_config.json": json.dumps(values).encode()})

    assert default_sampling({}) == of(temperature=0.6) == Sampling(temperature=0.0)
    assert of(do_sample=True, temperature=0.6, top_p=0.9, top_k=0) == Sampling(temperature=0.6, top_p=0.9)
    assert of(do_sample=True, repetition_penalty=1.1) == Sampling(repetition_penalty=1.1)
    with pytest.raises(ConfigError, match=r"generation_config.json.*top_p.*0"):
        of(do_sample=True, top_p=2)


def test_a_tokenizer_of_this_package_can_chat(opened):
    """Its special tokens have the names <bos> and <eos> in a template."""
    own = build_tokenizer(TokenizerConfig(kind="byte"), [""], normalization="none", masked=False)
    assert own.vocab_size <= opened.model.config.vocab_size
    source = "<bos>{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    chat = Chat(opened.model, opened.params, own, template=source)
    ids = chat.encode([{"role": "user", "content": "a <bos>"}]).ids
    assert ids == [own.bos_id, *own.encode("a <bos>"), own.eos_id]
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        Chat(opened.model, opened.params, own)


def test_invalid_arguments(opened, chat):
    with pytest.raises(ChatTemplateError, match="does not parse"):
        Chat(opened.model, opened.params, opened.tokenizer, template="{% if %}")
    empty = Chat(opened.model, opened.params, opened.tokenizer, template=ChatTemplate(""))
    with pytest.raises(ChatTemplateError, match=r"renders these messages as an empty text"):
        empty.reply(HELLO)
    with pytest.raises(ConfigError, match="messages must be a list"):
        chat.reply([])
    with pytest.raises(ConfigError, match="a stop string must be"):
        chat.stream(HELLO, stop=[""])


@pytest.mark.programs(7, reason="a model is saved and loaded, and saved again")
def test_an_export_keeps_the_template(tmp_path):
    """Also a template in a separate file, and additional templates."""
    directory = write_chat_model(tmp_path / "model", "qwen2")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "chat_template.jinja").write_text(config.pop("chat_template"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (directory / "integrity.json").unlink()
    before = open_model(directory)
    export(before, tmp_path / "copy")
    after = load_pretrained_tokenizer(tmp_path / "copy")
    assert {name: after.files[name] for name in before.tokenizer.files if name.endswith(".jinja")} == {
        name: content for name, content in before.tokenizer.files.items() if name.endswith(".jinja")
    }
    assert len([name for name in after.files if name.endswith(".jinja")]) == 2


def test_channels():
    """The answer of a model of the family gpt-oss is the text of one channel; the other is its reasoning."""
    own = tokenizer("gpt_oss")
    made = library("bytes", *FAMILIES["gpt_oss"][:2])
    text = "<|channel|>analysis<|message|>Easy 🙂.<|end|>"
    text += "<|start|>assistant<|channel|>final<|message|>It is 4 🙂.<|return|>"
    ids = made.encode(text, add_special_tokens=False).ids
    channels = Channels(own)
    pieces = [channels.add([i]) for i in ids]
    assert "".join(pieces) + channels.finish() == "It is 4 🙂."
    assert channels.reasoning == "Easy 🙂."
    ids = made.encode("Plain<|message|>body", add_special_tokens=False).ids
    channels = Channels(own)
    assert channels.add(ids) + channels.finish() == "Plainbody"
