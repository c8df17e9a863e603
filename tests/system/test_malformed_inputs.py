"""Malformed templates, rows, rewards and adapters: each gives one line with the position and the remedy."""

import json
import re
import time

import pytest
from chat_parts import files, write_chat_model
from fuzz_parts import CAGE, check_refusal

from transformer.chat import _template
from transformer.chat._template_files import find_template
from transformer.cli._errors import describe
from transformer.config._limited import LimitedProcesses
from transformer.data import Conversations, Preferences, Prompts, TokenizerConfig, prepare
from transformer.data.kinds._prompts import Prompt
from transformer.inference import open_model
from transformer.training import GRPO
from transformer.training.tasks._rewards import Rewards

SECONDS = 5
REMEDY = re.compile(
    r"\b(Add|Change|Check|Convert|convert|Correct|Download|Merge|Name|Pass|Put|Raise|Read|Remove|Rename|Simplify|Use)\b"
)
QUESTION, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One."}
TURNS = [QUESTION, ANSWER]
GOOD = {
    Conversations: {"messages": TURNS},
    Preferences: {"prompt": "is it?", "chosen": " no", "rejected": " yes"},
    Prompts: {"prompt": "a b"},
}


def says(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def refused(read, *expected):
    """Check that `read` is refused in one line which contains the expected parts and a remedy; return the line."""
    began = time.process_time()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - check_refusal checks its type and text
        read()
    assert time.process_time() - began < SECONDS
    check_refusal(caught.value)
    line = describe(caught.value)
    for part in expected:
        assert part in line
    assert line.endswith("."), line
    assert REMEDY.search(line), line
    return line


def prepared(folder, kind, line, **options):
    """Prepare a file whose second line is malformed; a dict is written as JSON."""
    rows = [json.dumps(GOOD[kind]).encode()] * 3
    rows[1] = line if isinstance(line, bytes) else json.dumps(line).encode()
    (folder / "rows.jsonl").write_bytes(b"\n".join(rows))
    options = {"tokenizer": TokenizerConfig(kind="byte"), **options}
    with CAGE.closed(folder):
        return prepare(kind(path=str(folder / "rows.jsonl"), **options))


CALL = {"role": "assistant", "tool_calls": "add"}
DEEP = b'{"messages":[{"role":"user","content":"a","x":' + b'{"a":[' * 40 + b"1" + b"]}" * 40 + b"}]}"
CONVERSATIONS = {
    "no assistant": (says(("user", "Hi"), ("user", "Again")), "needs a message with the role assistant"),
    "no messages": ({"messages": []}, "messages must be a list of messages, got []"),
    "messages are a number": ({"messages": 7}, "messages must be a list of messages, got 7"),
    "messages are a text": ({"messages": "Hi"}, "messages must be JSON, got 'Hi'"),
    "messages in a text are nested junk": ({"messages": "[" * 200_000}, "(nested too deeply)"),
    "messages in a text have a surrogate": ({"messages": '["\\ud800"]'}, "lone surrogate"),
    "a message is a text": ({"messages": ["Hi"]}, "message 0 must be a dict"),
    "no role": ({"messages": [{"content": "Hi"}, ANSWER]}, "the role of message 0 must be a word"),
    "a role is a marker": (says(("<|user|>", "Hi"), ("assistant", "x")), "the role of message 0 must be a word"),
    "no content": ({"messages": [{"role": "user"}, ANSWER]}, "the content of message 0 must be a text, got None"),
    "content is a number": (says(("user", 5), ("assistant", "x")), "the content of message 0 must be a text"),
    "an image": (says(("user", [{"type": "image", "url": "x"}]), ("assistant", "x")), "read only text, got 'image'"),
    "a number with 5,000 digits": (b'{"messages":[' + b"9" * 5000 + b"]}", "(a number has too many digits)"),
    "nested junk": (b'{"messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "(nested too deeply)"),
    "a deep message": (DEEP, "nested more than 32 levels deep"),
    "broken UTF-8": (b'{"messages":[{"role":"user","content":"\xff\xfe"}]}', "is not UTF-8 text: byte 131 is 0xff"),
    "a lone surrogate": (says(("user", "\ud800"), ("assistant", "x")), "lone surrogate"),
    "no JSON": (b'{"messages": [}', "expected a JSON object"),
    "a list": (b"[1, 2]", "expected a JSON object, got list"),
    "NaN": (b'{"messages": NaN}', "messages must be a list of messages, got nan"),
    "other columns": ({"text": "Hi"}, "expected the columns messages, prompt and completion"),
    "no completion": ({"prompt": "Hi"}, "expected the columns messages, prompt and completion"),
    "no value": ({"conversations": [{"from": "human"}]}, "must have from and value"),
    "tools are a dict": ({"messages": TURNS, "tools": {"a": 1}}, "tools must be a list of JSON schemas"),
    "a tool is a number": ({"messages": TURNS, "tools": [1]}, "a tool must be a function"),
    "a call is a text": (
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": "add"}]},
        "tool_calls of message 1",
    ),
    "switches are a list": ({"messages": TURNS, "chat_template_kwargs": [1]}, "must be a JSON object, got [1]"),
    "a switch is reserved": ({"messages": TURNS, "chat_template_kwargs": {"messages": 1}}, "can't be a switch"),
    "uneven lists": ({"messages": {"role": ["user", "assistant"], "content": ["a"]}}, "must have the same length"),
}
ODD = {"prompt": "a", "chosen": {"a": 1}, "rejected": {"a": 2}}
PREFERENCES = {
    "equal texts": ({"prompt": "a", "chosen": " b", "rejected": " b"}, "chosen and rejected are equal"),
    "equal messages": ({"chosen": TURNS, "rejected": TURNS}, "chosen and rejected are equal"),
    "no rejected": ({"prompt": "a", "chosen": " b"}, "expected the columns prompt, chosen and rejected"),
    "rejected is null": ({"prompt": "a", "chosen": " b", "rejected": None}, "expected the columns prompt, chosen"),
    "rejected is a number": ({"prompt": "a", "chosen": " b", "rejected": 3}, "rejected must be a text like chosen"),
    "chosen is empty": ({"prompt": "a", "chosen": "", "rejected": "x"}, "the text of chosen is empty"),
    "the prompt is blank": ({"prompt": " ", "chosen": "b", "rejected": "x"}, "the text of prompt is empty"),
    "nothing in common": ({"chosen": "b", "rejected": "x"}, "it is the common beginning of both responses"),
    "no message after the prompt": (
        {"chosen": TURNS, "rejected": TURNS[:1]},
        "rejected has no message after",
    ),
    "messages are numbers": ({"chosen": [3], "rejected": [4]}, "the prompt is empty"),
    "chosen is a dict": (ODD, "chosen must be a list of messages"),
    "true and false": (
        {"prompt": "a", "chosen": True, "rejected": False},
        "chosen must be a list of messages",
    ),
    "a lone surrogate": ({"prompt": "a", "chosen": "\udfff", "rejected": "b"}, "lone surrogate"),
    "a line that is cut": (b'{"prompt":"a","chosen":"b","reje', "expected a JSON object"),
}
PROMPTS = {
    "a blank prompt": ({"prompt": "  "}, "prompt must be a text or a list of messages"),
    "another column": ({"question": "a"}, "name the column of the prompt (--data.prompt-column)"),
    "a list of texts": ({"prompt": ["a"]}, "prompt must be a text or a list of messages"),
    "a message without content": ({"prompt": [{"role": "user"}]}, "the content of message 0 must be a text"),
    "a column of the rewards": ({"prompt": "a", "completion": "b"}, "must not be called 'completion'"),
    "a prompt that is too long": ({"prompt": "a" * 999}, "1 to 256 tokens (max_prompt_length), got 999"),
    "a surrogate in a column": ({"prompt": "a", "answer": {"x": "\ud800"}}, "lone surrogate"),
}
ROWS = [
    pytest.param(kind, *case, id=f"{kind.__name__}: {name}")
    for kind, cases in ((Conversations, CONVERSATIONS), (Preferences, PREFERENCES), (Prompts, PROMPTS))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("kind", "row", "expected"), ROWS)
def test_a_malformed_row_is_a_one_line_error(kind, row, expected, tmp_path):
    """The line names the file and the row, whichever tokenizer reads the data."""
    for tokenizer in ("byte", "char"):
        read = lambda: prepared(tmp_path, kind, row, tokenizer=TokenizerConfig(kind=tokenizer))  # noqa: B023, E731
        refused(read, f"{tmp_path}/rows.jsonl", "line 2", expected)


@pytest.mark.parametrize(
    ("kind", "row", "options", "expected"),
    [
        (Conversations, says(("user", "x" * 99), ("assistant", "x")), {"sequence_length": 2}, "nothing is trained"),
        (
            Preferences,
            {"prompt": "a" * 9, "chosen": " b", "rejected": " c"},
            {"max_length": 2},
            "a response is missing",
        ),
    ],
)
def test_rejects_data_whose_targets_are_all_masked(kind, row, options, expected, tmp_path):
    refused(lambda: prepared(tmp_path, kind, row, **options), f"from {tmp_path}/rows.jsonl, line 1 on: ", expected)


SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no system message, please') }}{% endif %}"
LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "does not parse": ("{% for m in messages %}{{ m.content }", "does not parse in line 1"),
    "refuses a role": ("{% for m in messages %}" + SYSTEM + "{{ m.content }}{% endfor %}", "no system message, please"),
    "loops for ever": (LOOP, "was stopped, because it needs more than 1 seconds"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "its calls are nested too deeply"),
    "reads a class": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    "reads globals": ("{{ messages.append.__globals__ }}", "is unsafe"),
    "changes the messages": ("{% set x = messages.append(1) %}", "is unsafe"),
    "reads a file": ("{% include '/etc/passwd' %}", "can't read other templates, got '/etc/passwd'"),
    "imports a file": ("{% import 'os' as os %}{{ os }}", "can't read other templates, got 'os'"),
    "writes too much": ("{{ 'x' * 999999999 }}", "it needs more than 512 MiB of memory"),
    "computes too much": ("{{ 9 ** 99999 }}", "Exceeds the limit (4300 digits)"),
    "reads a missing field": ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
    "divides by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "names no filter": ("{{ messages | nofilter }}", "No filter named 'nofilter'"),
    "names no tag": ("{% foo %}", "unknown tag 'foo'"),
    "is too long": ("x" * (2**20 + 1), "has 1,048,577 characters"),
    "drops the answer": ("{% for m in messages[:2] %}{{ m.content }}{% endfor %}", "use a template that writes it"),
    "is not UTF-8": (b"{{ messages }}\n\xff", "is not UTF-8 text: byte 15 is 0xff, in line 2"),
    "is empty": ("", "is empty: expected text"),
}


@pytest.mark.parametrize(("source", "expected"), TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_malformed_template_of_a_run_is_a_one_line_error(source, expected, tmp_path, monkeypatch):
    """The line names the file that the user passed, and the option for another one."""
    processes = LimitedProcesses(_template.PROGRAM, None, seconds=1.0, most_bytes=_template.MOST_BYTES)
    monkeypatch.setattr(_template, "_renderers", lambda: processes)
    path = tmp_path / "my.jinja"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    row = says(("system", "x"), ("user", "Hi"), ("assistant", "x"))
    line = refused(lambda: prepared(tmp_path, Conversations, row, template_path=str(path)), expected)
    assert str(path) in line or "(--data.template-path)" in line
    assert "tokenizer_config.json" not in line
    assert "(--template)" not in line


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"chat_template.jinja": b"\xff"}, "dir/chat_template.jinja is not UTF-8: byte 0"),
        ({"chat_template.jinja": b"{{"}, "dir/chat_template.jinja: the chat template does not parse in line 1"),
        ({"chat_template.json": b"{"}, "dir/chat_template.json is not valid JSON"),
        (
            {"chat_template.json": b'{"chat_template": [{"name": 3}]}'},
            "chat_template in dir/chat_template.json",
        ),
        (
            {"tokenizer_config.json": b'{"chat_template": 7}'},
            "chat_template in dir/tokenizer_config.json",
        ),
        ({"tokenizer_config.json": b"[" * 100_000}, "dir/tokenizer_config.json is not valid JSON"),
        ({"tokenizer_config.json": b"{}"}, "dir has no chat template"),
    ],
)
def test_a_malformed_template_of_a_model_is_a_one_line_error(changed, expected):
    refused(lambda: find_template(files("smollm") | changed, place="dir"), expected)


REWARDS = """
def nan(completion, **columns):
    return float("nan")
def text(completion, **columns):
    return "good"
def raising(completion, **columns):
    raise KeyError("no such column")
def needy(prompt, completion, missing):
    return 0.0
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rewards.py:nan", ("must be a finite number, got nan", "rows.jsonl, line 7")),
        ("rewards.py:text", ("must be a finite number, got 'good'", "rows.jsonl, line 7")),
        ("rewards.py:raising", ("raised KeyError ('no such column')", "rows.jsonl, line 7")),
        ("rewards.py:needy", ("Add **columns to its arguments", "rows.jsonl, line 7")),
        ("rewards.py:nothing", ("has no function 'nothing'",)),
        ("broken.py:nan", ("can't be imported: SyntaxError",)),
        ("missing.py:nan", ("no file", "missing.py")),
        ("rewards.py", ("must be 'module:function' or 'file.py:function'",)),
        ("no_such_module:nan", ("can't be imported: ModuleNotFoundError",)),
    ],
)
def test_a_malformed_reward_is_a_one_line_error(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("def nan(:")
    prompt = Prompt("a", {}, "rows.jsonl, line 7")

    def judge():
        rewards = Rewards(GRPO(rewards=(name,), max_new_tokens=2))
        rewards.check(prompt)
        rewards([prompt], ["x"])

    refused(judge, *expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(write_chat_model(tmp_path_factory.mktemp("models") / "smollm"))


ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("config", "weights", "expected"),
    [
        (json.dumps(ADAPTER).encode(), {"layers.0.self_attn.q_proj": (2, 99)}, "does not fit this Llama model"),
        (json.dumps(ADAPTER).encode(), {"layers.7.self_attn.q_proj": (2, 16)}, "has no such linear layer"),
        (json.dumps(ADAPTER).encode(), b"junk", "adapter_model.safetensors"),
        (json.dumps(ADAPTER | {"r": 10**30}).encode(), {"layers.0.self_attn.q_proj": (2, 16)}, "adapter_config.json"),
        (b"[" * 100_000, {}, "adapter_config.json"),
        (b'{"peft_type": "\xff"}', {}, "adapter_config.json"),
        (b"{}", {}, "adapter_config.json"),
    ],
    ids=["another size", "another depth", "junk", "a huge rank", "nested junk", "broken UTF-8", "empty"],
)
def test_a_malformed_adapter_is_a_one_line_error(config, weights, expected, model, tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "adapter_config.json").write_bytes(config)
    file = tmp_path / "adapter_model.safetensors"
    if isinstance(weights, bytes):
        file.write_bytes(weights)
    else:
        name = "base_model.model.model.{}.lora_{}.weight"
        pairs = {name.format(place, "A"): np.ones(shape, np.float32) for place, shape in weights.items()}
        pairs |= {name.format(place, "B"): np.ones((16, 2), np.float32) for place in weights}
        save_file(pairs, file)
    refused(lambda: model.add_adapter(tmp_path), expected)
