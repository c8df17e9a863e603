"""Conversations: file formats, which tokens are trained, packed rows, tokenizers with markers, and bad input."""

import contextlib
import json
from datetime import datetime

import numpy as np
import pytest
from chat_parts import FAMILIES, files, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.chat import ChatEncoder, find_template
from transformer.config import ConfigError
from transformer.data import Conversations, JsonLines, TokenizerConfig, load_tokenizer, prepare
from transformer.data._chat_tokenizer import default_template, with_template
from transformer.data._conversations import marked
from transformer.data._dataset import padding
from transformer.data._packed_rows import PackedRows, best_fit, chunks
from transformer.data._turns import Conversation, conversation, encode
from transformer.data.files._records import read_records

NOW = datetime(2025, 1, 1)
TURNS = [
    {"role": "user", "content": "Hi a"},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "Hi b"},
    {"role": "assistant", "content": "Two."},
]
CHARS = TokenizerConfig(kind="char")


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def trained_text(made, messages, train_on="assistant", **fields):
    """Return the trained texts of a conversation, joined by |."""
    encoder = ChatEncoder(find_template(made.files), made)
    encoded, trained = encode(encoder, Conversation("file, line 1", messages, **fields), train_on, NOW)
    text, last = [], 0
    for (start, end), counts in zip(encoded.offsets, trained, strict=True):
        if counts and end > last:
            text.append("|" * (start > last and bool(text)) + encoded.text[max(start, last) : end])
            last = end
    return "".join(text)


def some(rows=12):
    return [{"messages": [*TURNS[:1], {"role": "assistant", "content": "x" * (i % 5 + 1)}]} for i in range(rows)]


# Which tokens are trained

ENDS = {
    "llama3": "<|eot_id|>",
    **dict.fromkeys(("gemma2", "gemma3"), "<end_of_turn>"),
    **dict.fromkeys(("mistral", "mixtral"), "</s>"),
    **dict.fromkeys(("phi3", "phi4_mini"), "<|end|>"),
    "olmo2": "<|endoftext|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_assistant_tokens_and_end_of_turn_tokens_are_trained(family):
    """For the templates of all families, most of which don't mark what the assistant writes."""
    end = ENDS.get(family, "<|im_end|>")
    first, last = f"One.{end}", f"Two.{end}"
    if family == "gpt_oss":
        first, last = "<|channel|>final<|message|>One.<|end|>", "<|channel|>final<|message|>Two.<|return|>"
    elif family == "qwen3":
        last = f"<think>\n\n</think>\n\n{last}"
    elif family in ("mistral", "mixtral"):
        first, last = f" {first}", f" {last}"
    made = tokenizer(family)
    # The markers of Phi-3 include the line feed after them.
    assert trained_text(made, TURNS).replace("|>\n", "|>") == f"{first}|{last}"
    assert trained_text(made, TURNS, "last").strip() == last.strip()
    assert trained_text(made, TURNS, given=3).strip() == last.strip()
    template = find_template(made.files)
    whole = template.run(template.variables(TURNS, None, None, False, False, {}), now=NOW).text
    assert trained_text(made, TURNS, "everything") == whole


def test_calls_of_tools_are_trained_and_their_results_are_not():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "It is 1."},
    ]
    got = trained_text(tokenizer("qwen2"), messages)
    calls, answer = got.split("|<", 1)[0], got.rsplit("|", 3)[-3:]
    assert '"name": "add"' in calls
    assert "tool_response" not in got
    assert "It is 1." in "".join(answer)


def test_a_marker_in_a_message_is_text(tmp_path):
    rows = [{"messages": [TURNS[0], {"role": "assistant", "content": "Say <eos> and <|user|>."}]}] * 2
    dataset = prepare(Conversations(path=write(tmp_path / "a.jsonl", rows), tokenizer=CHARS, sequence_length=64))
    assert dataset.example == [("<|user|>Hi a<|assistant|>", False), ("Say <eos> and <|user|>.<eos>", True)]
    batch = dataset.eval_batches()[0]
    made = dataset.tokenizer
    names = made.tokens(batch["tokens"][0][batch["segment_ids"][0] > 0])
    assert [name for name in names if len(name) > 1] == ["<|user|>", "<|assistant|>"]
    targets = batch["targets"][0][batch["weights"][0] > 0]
    assert made.decode(targets) == "Say <eos> and <|user|>."
    assert targets[-1] == made.eos_id


def test_the_example_is_shown_in_color_or_brackets():
    parts = [("<|user|>", False), ("a\x1b[0m", True)]
    assert marked(parts, color=False) == "<|user|>[a\\x1b[0m]"
    assert marked(parts, color=True) == "<|user|>\033[1;32ma\\x1b[0m\033[0m"
    assert len(marked([("a" * 9000, True)], color=False)) < 2000


# Files


def saved(tmp_path, rows, form):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.Table.from_pylist(rows)
    if form == "parquet":
        parquet.write_table(table, tmp_path / "a.parquet")
        return tmp_path / "a.parquet"
    if form == "arrow":
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return tmp_path / "a.arrow"
    for split in ("train", "test"):
        folder = tmp_path / "all" / split
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        (folder / "dataset_info.json").write_text("{}")
        with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return tmp_path / "all"


@pytest.mark.parametrize("form", ["parquet", "arrow", "saved"])
def test_every_format_gives_the_same_conversations(tmp_path, form):
    rows = [{"messages": TURNS, "tools": None}, {"messages": [*TURNS[:2], {**TURNS[0], "name": "Ann"}, TURNS[3]]}]
    expected = [conversation(record).messages for record in read_records(write(tmp_path / "a.jsonl", rows))]
    path = saved(tmp_path, rows, form)
    records = read_records(str(path))
    assert [conversation(record).messages for record in records] == expected
    assert records[1].place.endswith(", row 1")
    config = Conversations(path=str(path), tokenizer=CHARS, sequence_length=64)
    assert {split: len(part) for split, part in config.read().items()} == (
        {"train": 2, "validation": 2} if form == "saved" else {"train": 1, "validation": 1}
    )


def test_accepts_the_common_row_formats():
    expected = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    forms = [
        {"messages": expected},
        {"messages": json.dumps(expected)},
        {"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}},
        {"prompt": "a", "completion": "b"},
        {"prompt": expected[:1], "completion": expected[1:]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    for form in forms:
        found = conversation(type("", (), {"values": form, "place": "x"}))
        assert list(found.messages) == expected, form
        assert found.given == ("prompt" in form)


BAD = [
    ("", "is empty"),
    ("{", "line 1: expected a JSON object.*Parquet"),
    ('["a"]', "line 1: expected a JSON object, got list"),
    ('{"text": "a"}', "line 1: expected the columns messages, prompt and completion, or conversations, got 'text'"),
    ('{"messages": []}', "line 1: messages must be a list of messages, got"),
    ('{"messages": "hello"}', "line 1: messages must be JSON, got 'hello'"),
    ('{"messages": {"role": ["user"], "content": []}}', "must have the same length"),
    ('{"messages": [{"role": "user"}]}', "line 1: the content of message 0 must be a text"),
    ('{"messages": [{"role": 3, "content": "a"}]}', "line 1: the role of message 0 must be a word"),
    ('{"messages": [{"role": "user", "content": "a"}]}', r"line 1: .*role assistant, got the roles user\. Add one"),
    ('{"messages": [{"role": "poet", "content": "a"}, {"role": "assistant", "content": "b"}]}', "line 1: .*refuses"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}]}', "surrogate"),
    (
        '{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "user", "content": "b"}]}',
        "after the prom",
    ),
    ('{"prompt": "a", "completion": 3}', "line 1: completion must be a list of messages, got 3"),
    ('{"conversations": [{"from": 1}]}', "must have from and value"),
    ('{"prompt": "a", "completion": "b", "tools": "x"}', "line 1: tools must be JSON"),
    ('{"prompt": "a", "completion": "b", "tools": {"a": 1}}', "line 1: tools must be a list"),
    ('{"prompt": "a", "completion": "b", "chat_template_kwargs": [1]}', "line 1: chat_template_kwargs must be"),
    (
        '{"prompt": "a", "completion": "b", "chat_template_kwargs": {"messages": 1}}',
        "line 1: messages can't be a switch",
    ),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_rejects_unusable_rows(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(f"{content}\n" * 2)
    with pytest.raises(ValueError, match=message) as caught:
        prepare(Conversations(path=str(tmp_path / "a.jsonl"), tokenizer=TokenizerConfig(kind="byte")))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "a.jsonl") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 this is no table PAR1", r"a\.parquet"),
        ("a.arrow", b"ARROW1\0\0 damaged", r"a\.arrow"),
        ("a.arrow", b"", "is not a readable Arrow file"),
        ("d/other.json", b"{}", r"state\.json"),
        ("d/state.json", b"{", r"state\.json"),
        ("d/state.json", b"[]", r"JSON"),
        ("d/state.json", b'{"_data_files": 5}', "must name files of this folder, got 5"),
        ("d/state.json", b'{"_data_files": [{"filename": "../a.arrow"}]}', "must name files of this folder"),
        ("d/state.json", b'{"_data_files": [{"filename": "a.arrow"}]}', "no file"),
        ("d/dataset_dict.json", b'{"splits": ["other"]}', r"'train'"),
        ("d/dataset_dict.json", b'{"splits": ["../other"]}', "must be names of folders"),
    ],
)
def test_rejects_damaged_files(tmp_path, name, content, message):
    pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(Conversations(path=str(path.parent if name.startswith("d/") else path)))


def test_a_damaged_table_is_refused_or_read(tmp_path):
    """Bytes of a real file are changed: reading ends with a ValueError or with rows, never otherwise."""
    path = saved(tmp_path, some(4), "parquet")
    content, random = path.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.integers(0, len(damaged), 3):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):  # every other error fails
            read_records(str(path))


# Options


def test_long_conversations_are_cut_and_counted(tmp_path):
    rows = [*some(10), {"messages": [{"role": "user", "content": "u" * 90}, TURNS[1]]}, {"messages": TURNS}]
    path = write(tmp_path / "a.jsonl", [*rows, *some(2)])
    dataset = prepare(Conversations(path=path, tokenizer=CHARS, sequence_length=10, validation_share=0.1))
    said = dataset.describe()
    assert "12 train conversations, 4 cut at 10 tokens, 1 of them left out, because nothing is trained" in said
    with pytest.raises(ValueError, match=r"--data\.sequence-length"):
        prepare(Conversations(path=path, tokenizer=CHARS, sequence_length=3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_on": "user"}, r"train_on.*got 'user'"),
        ({"date": "today"}, r"date.*2025-01-31.*got 'today'"),
        ({"sequence_length": 0}, r"sequence_length.*1"),
    ],
)
def test_rejects_options_out_of_range(fields, message, without_type_checks):
    with pytest.raises(ConfigError, match=message):
        Conversations(path="a.jsonl", **fields)


# Tokenizers


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "word"])
def test_a_built_tokenizer_has_markers_and_is_reused(tmp_path, kind):
    path = write(tmp_path / "a.jsonl", some())
    dataset = prepare(Conversations(path=path, sequence_length=64, tokenizer=TokenizerConfig(kind=kind)))
    dataset.tokenizer.save_alone(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert json.loads(loaded.files["tokenizer_config.json"])["chat_template"] == default_template("<eos>")
    again = prepare(dataset.config, loaded)
    assert again.fingerprint == dataset.fingerprint
    assert trained_text(loaded, some()[0]["messages"]) == "x<eos>"
    if kind == "char":
        assert loaded.encode("Hi ?") == [*loaded.encode("Hi "), loaded.unk_id]


@pytest.mark.parametrize("missing", [{}, {"chat_template": None}])
def test_a_model_without_template_gets_one_without_new_tokens(tmp_path, missing):
    given = files("olmo2")
    config = json.loads(given["tokenizer_config.json"])
    del config["chat_template"]
    config |= missing
    made = with_template(
        type(tokenizer("olmo2"))({**given, "tokenizer_config.json": json.dumps(config).encode()}), None
    )
    assert made.vocab_size == tokenizer("olmo2").vocab_size
    assert find_template(made.files).render(TURNS[:2]) == "<|user|>\nHi a\n<|assistant|>\nOne.<|endoftext|>"
    assert trained_text(made, TURNS) == "One.<|endoftext|>|Two.<|endoftext|>"
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}")
    config = Conversations(path=write(tmp_path / "a.jsonl", some()), template_path=str(own), train_on="everything")
    text, counts = prepare(config, made).example[0]
    assert (text, counts) == ("<user>Hi a<|endoftext|><assistant>x<|endoftext|>", True)


def test_a_vocabulary_is_built_from_message_texts_only(tmp_path):
    parts = [{"type": "text", "text": "Why?"}]
    rows = [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "No."}]}]
    options = {"tokenizer": CHARS, "sequence_length": 200}
    dataset = prepare(Conversations(path=write(tmp_path / "a.jsonl", rows * 2), **options))
    assert dataset.prompts() == ["Why?"]
    entries = json.loads(dataset.tokenizer.files["tokenizer.json"])["model"]["vocab"]
    assert {entry for entry in entries if len(entry) == 1} == set("Why?No.")
    # Calls, results and schemas of tools are JSON in the text.
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": [1]}}}
    messages = [*TURNS[:1], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": {"sum": 2}}]
    tool = {"type": "function", "function": {"name": "add", "description": "Add", "parameters": {"type": "object"}}}
    path = write(tmp_path / "b.jsonl", [{"messages": messages, "tools": [tool]}] * 2)
    dataset = prepare(Conversations(path=path, **options))
    assert dataset.tokenizer.unk_id not in dataset.eval_batches()[0]["tokens"]


@pytest.mark.parametrize("further", [True, False])
def test_the_given_template_is_used_for_tools_too(further):
    """Even if the model stores a separate template for conversations with tools, in any file."""
    given = files("olmo2")
    config = json.loads(given["tokenizer_config.json"])
    config["chat_template"] = [{"name": name, "template": "other"} for name in ("default", "tool_use")]
    given = {**given, "tokenizer_config.json": json.dumps(config).encode()}
    if further:
        given |= {"chat_template.jinja": b"other", "additional_chat_templates/tool_use.jinja": b"other"}
    made = with_template(type(tokenizer("olmo2"))(given), "own")
    assert [find_template(made.files, tools=tools).source for tools in (False, True)] == ["own", "own"]


# Packed rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_best_fit_places_every_item_once(lengths):
    rows = best_fit(lengths, 16)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    used = [sum(lengths[item] for item in row) for row in rows]
    assert max(used) <= 16
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 16) * 2  # far from one row per item
    assert sum(used_row <= 8 for used_row in used) <= 1  # two half-empty rows would have been one


def test_packed_rows_contain_every_sequence():
    random = np.random.default_rng(0)
    sequences = [random.integers(5, 90, random.integers(2, 12)).tolist() for _ in range(30)]
    trained = [random.integers(0, 2, len(one)).astype(bool).tolist() for one in sequences]
    rows = PackedRows(sequences, trained, 12, 0)
    batch = rows.assemble(np.arange(len(rows)))
    found = []
    for row in range(len(rows)):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            inside = batch["segment_ids"][row] == segment
            assert batch["positions"][row][inside].tolist() == list(range(inside.sum()))
            tokens, targets = batch["tokens"][row][inside].tolist(), batch["targets"][row][inside].tolist()
            assert tokens[1:] == targets[:-1]
            found.append(([tokens[0], *targets], batch["weights"][row][inside].tolist()))
    expected = [(one, [float(flag) for flag in flags[1:]]) for one, flags in zip(sequences, trained, strict=True)]
    assert sorted(found) == sorted(expected)
    empty = int((batch["segment_ids"] == 0).sum())
    assert padding(batch) == (empty, batch["tokens"].size)
    assert rows.padding == pytest.approx(empty / batch["tokens"].size)
    assert rows.targets == batch["weights"].sum()


def test_rows_are_in_the_order_of_the_data():
    """Rows in order of length would make the first evaluation batches a sample of long sequences only."""
    lengths = np.random.default_rng(1).integers(2, 12, 60).tolist()
    sequences = [[number] * length for number, length in enumerate(lengths)]
    rows = PackedRows(sequences, [[True] * length for length in lengths], 12, 0)
    longest = [int(rows.assemble(np.array([row]))["tokens"][0, 0]) for row in range(len(rows))]
    assert longest == sorted(longest)


def test_documents_are_packed(tmp_path):
    assert [list(part) for part in chunks(range(8), 3)] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7]]
    path = write(tmp_path / "a.jsonl", [{"text": "ab" * (i % 9 + 1)} for i in range(40)])
    config = JsonLines(path=path, sequence_length=8, batch_size=2, packing=True)
    assert config.segments
    dataset = prepare(config)
    assert "36 train documents: 360 tokens in" in dataset.describe()  # each with its end token as a target
    batches = dataset.eval_batches()
    assert sum(batch["weights"].sum() for batch in batches) == sum(2 * (i % 9 + 1) for i in range(36, 40))
    assert set(next(dataset.train_batches(0))) == {"tokens", "targets", "weights", "segment_ids", "positions"}
    assert dataset.prompts()
