"""Weights of messages, and vocabularies that contain the words of a template."""

import json
from datetime import datetime

import numpy as np
import pytest
from chat_parts import tokenizer

from transformer.chat import ChatEncoder, ChatTemplate, find_template
from transformer.data import Conversations, Preferences, Prompts, TokenizerConfig, prepare
from transformer.data._turns import Conversation, conversation, encode
from transformer.data.files._records import Record

NOW = datetime(2025, 1, 1)
BODY = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + BODY + "{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'BOT: ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}BOT: think {% endif %}"
)


def chat(*turns):
    """Return messages of the user and the assistant in turn; a tuple is a content and a weight."""
    roles = ("user", "assistant")
    pairs = [turn if isinstance(turn, tuple) else (turn, None) for turn in turns]
    return [
        {"role": roles[i % 2], "content": text} | ({} if weight is None else {"weight": weight})
        for i, (text, weight) in enumerate(pairs)
    ]


def trained_words(encoder, messages, train_on="assistant"):
    encoded, trained = encode(encoder, Conversation("file, line 1", messages), train_on, NOW)
    places = {place for span, counts in zip(encoded.offsets, trained, strict=True) if counts for place in range(*span)}
    return "".join(encoded.text[place] for place in sorted(places)).replace("<|end|>", " ").split()


def encoders():
    made = tokenizer("phi3")
    return {
        "markers": ChatEncoder(find_template(made.files), made),
        "generation": ChatEncoder(ChatTemplate(MARKED), made),
    }


@pytest.mark.parametrize("kind", ["markers", "generation"])
def test_a_message_with_weight_0_is_read_and_not_trained(kind):
    encoder = encoders()[kind]
    assert trained_words(encoder, chat("a", "bad", "b", "good")) == ["bad", "good"]
    assert trained_words(encoder, chat("a", ("bad", 0), "b", ("good", 1))) == ["good"]
    assert trained_words(encoder, chat(("a", 0), ("good", 1.0), "b", ("bad", 0))) == ["good"]
    plain, weighted = (
        encode(encoder, Conversation("p", messages), "assistant", NOW)[0]
        for messages in (chat("a", "bad", "b", "good"), chat("a", ("bad", 0), "b", "good"))
    )
    assert plain.ids == weighted.ids


@pytest.mark.parametrize(
    ("messages", "train_on", "words"),
    [
        (chat("a", ("b", 0.5)), "assistant", ["message 1", "0 or 1", "0.5"]),
        (chat("a", ("b", "0")), "assistant", ["message 1", "0 or 1", "'0'"]),
        (chat(("a", 1), "b"), "assistant", ["message 0", "user", "--data.train-on everything"]),
        (chat("a", ("b", 0)), "everything", ["message 1", "weight 0", "--data.train-on assistant"]),
        (chat("a", ("b", 0)), "assistant", ["no token", "weight 0"]),
        (chat("a", "b", "c", ("d", 0)), "last", ["no token", "weight 0"]),
    ],
)
def test_rejects_unsupported_message_weights(messages, train_on, words):
    with pytest.raises(ValueError, match="(?s)file, line 1: .*" + ".*".join(words)):
        trained_words(encoders()["markers"], messages, train_on)


def test_sharegpt_rows_keep_extra_entries():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0, "name": "x"}]
    found = conversation(Record("p", {"conversations": turns})).messages
    assert found == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0, "name": "x"}]


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def row(kind):
    """Return a row of each kind of data with messages."""
    asked, answer = chat("do x?", "yes")
    if kind is Conversations:
        return {"messages": [asked, answer]}
    if kind is Preferences:
        return {"prompt": [asked], "chosen": [answer], "rejected": [{**answer, "content": "no"}]}
    return {"prompt": [asked], "answer": "yes"}


@pytest.mark.parametrize("data", [Conversations, Preferences, Prompts])
@pytest.mark.parametrize(("vocabulary", "size"), [("char", None), ("word", None), ("word", 40)])
def test_a_built_vocabulary_has_the_words_of_the_template(tmp_path, data, vocabulary, size):
    path = tmp_path / "t.jinja"
    path.write_text(WORDS)
    options = {"template_path": str(path), "tokenizer": TokenizerConfig(kind=vocabulary, vocab_size=size)}
    made = prepare(data(path=write(tmp_path / "a.jsonl", [row(data)] * 4), **options))
    encoder = ChatEncoder(find_template(made.tokenizer.files), made.tokenizer)
    values = encoder.template.variables(chat("do x?", "yes", "do"), None, None, True, False, {})
    assert made.tokenizer.unk_id not in encoder.encode(values).ids
    unseen = encoder.template.variables(chat("zebra"), None, None, True, False, {})
    assert made.tokenizer.unk_id in encoder.encode(unseen).ids


def test_rows_that_differ_in_a_role_have_different_tokens(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    rows = [
        {"messages": [{"role": role, "content": "?"}, {"role": "assistant", "content": "!"}]}
        for role in ("user", "tool")
    ]
    options = {"template_path": str(path), "packing": False, "sequence_length": 40}
    found = prepare(
        Conversations(path=write(tmp_path / "a.jsonl", rows * 2), tokenizer=TokenizerConfig(kind="char"), **options)
    )
    tokens = found._rows["train"].assemble(np.arange(2))["tokens"]
    assert (tokens[0] != tokens[1]).any()
    assert found.tokenizer.unk_id not in tokens


def test_a_template_error_names_the_row(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    rows = [{"messages": [*chat("a", "b"), {"role": "tool", "content": "c"}]}]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: .*no tools"):
        prepare(
            Conversations(
                path=write(tmp_path / "a.jsonl", rows * 2),
                template_path=str(path),
                tokenizer=TokenizerConfig(kind="char"),
            )
        )


def test_a_vocabulary_without_unknown_token_names_the_problem():
    from transformer.data.tokenizers._export import as_pretrained
    from transformer.data.tokenizers._vocabularies import CharTokenizer

    with pytest.raises(ValueError, match=r"vocabulary.*no unknown"):
        as_pretrained(CharTokenizer(["a"])).encode("b")
