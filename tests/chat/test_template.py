"""Chat templates: where they are stored, their output, and errors of one line."""

import json
import re
import threading
from datetime import datetime

import pytest
from chat_parts import CONVERSATIONS, FAMILIES, TEMPLATES, files, template, weather
from fuzz_parts import check_refusal

from transformer.chat import ChatTemplate, ChatTemplateError, _template, find_template, function_schema
from transformer.config import ConfigError
from transformer.config._limited import LimitedProcesses
from transformer.config._limited_worker import MEMORY_FILE

HELLO = [{"role": "user", "content": "Hello"}]


def test_renders_a_chatml_conversation():
    rendered = ChatTemplate(template("smollm")).render(CONVERSATIONS["system"], add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_of_every_family_renders(family):
    """The parity tests compare the texts with transformers; here, each keeps the words of the user."""
    made = find_template(files(family))
    rendered = made.render(HELLO, add_generation_prompt=True)
    assert rendered.count("Hello") == 1
    assert rendered != made.render([{"role": "user", "content": "Bye"}], add_generation_prompt=True)


def test_tools_and_switches_reach_the_template():
    text = ChatTemplate(template("qwen2")).render(HELLO, tools=[weather])
    assert json.dumps(function_schema(weather), ensure_ascii=False) in text
    off = {"add_generation_prompt": True, "enable_thinking": False}
    assert ChatTemplate(template("qwen3")).render(HELLO, **off).endswith("<think>\n\n</think>\n\n")


def test_a_final_message_is_continued():
    made = ChatTemplate(template("qwen2"))
    messages = [*HELLO, {"role": "assistant", "content": "The answer is "}]
    assert made.render(messages, continue_final_message=True).endswith("<|im_start|>assistant\nThe answer is ")
    trimmed = ChatTemplate(template("llama3")).render(messages, continue_final_message=True)
    assert trimmed.endswith("<|end_header_id|>\n\nThe answer is")
    with pytest.raises(ChatTemplateError, match="changes the last message"):
        ChatTemplate("{{ messages[0].content }}").render(messages, continue_final_message=True)
    with pytest.raises(ConfigError, match="Pass only one of them"):
        made.render(messages, continue_final_message=True, add_generation_prompt=True)


def test_assistant_text_is_marked():
    made = ChatTemplate(template("documents"))
    values = made.variables(CONVERSATIONS["three"], None, None, False, False, {})
    found = made.run(values)
    assert [found.text[start:end] for start, end in found.generated] == ["Hi!\n\nHow are you?<|im_end|>"]


class TestFiles:
    """Files in which a template is found."""

    def test_the_first_file_with_a_template_is_used(self):
        config = {"tokenizer_config.json": json.dumps({"chat_template": "config", "bos_token": {"content": "<s>"}})}
        given = {name: text.encode() for name, text in config.items()}
        assert find_template(given).source == "config"
        assert find_template(given).special_tokens == (("bos_token", "<s>"),)
        given["chat_template.json"] = b'{"chat_template": "json"}'
        assert find_template(given).source == "json"
        given["chat_template.jinja"] = b"jinja"
        assert find_template(given, place="dir").name == "dir/chat_template.jinja"
        assert find_template(given).source == "jinja"

    def test_named_templates(self):
        named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
        given = {"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}
        assert find_template(given).source == "a"
        assert find_template(given, tools=True).source == "b"
        assert find_template(given, "tool_use").source == "b"
        with pytest.raises(ChatTemplateError, match=r"'tool_us'.*'tool_use'"):
            find_template(given, "tool_us")
        given = {"chat_template.jinja": b"c", "additional_chat_templates/tool_use.jinja": b"d"}
        assert (find_template(given).source, find_template(given, tools=True).source) == ("c", "d")

    @pytest.mark.parametrize("value", [3, [1], [{"name": "default"}], {"default": 1}, []])
    def test_rejects_other_template_values(self, value):
        with pytest.raises(ChatTemplateError, match=r"chat_template.*tokenizer_config.json"):
            find_template({"tokenizer_config.json": json.dumps({"chat_template": value}).encode()})

    def test_reports_a_missing_template(self):
        with pytest.raises(ChatTemplateError, match=r"some/dir.*\(chat_template.jinja.*chat_temp"):
            find_template({}, place="some/dir")

    def test_rejects_a_template_that_is_not_utf8(self):
        with pytest.raises(ChatTemplateError, match=r"chat_template.jinja.*UTF-8.*1"):
            find_template({"chat_template.jinja": b"a\xff"})


def limited(**limits):
    return LimitedProcesses(_template.PROGRAM, None, **{"seconds": 0.5, "most_bytes": 2**26, **limits})


@pytest.fixture(scope="module")
def processes():
    made = limited()
    yield made
    made.close()


@pytest.fixture
def small_limits(processes, monkeypatch):
    """Half a second, and 64 MiB of memory."""
    monkeypatch.setattr(_template, "_renderers", lambda: processes)


MALFORMED = {
    "{% for m in messages %}": "does not parse in line 1: Unexpected end of template",
    "a\n{{ messages | unknown }}": "does not parse in line 2: No filter named 'unknown'",
    "{% if %}": "does not parse in line 1",
    "{{ 'a' }": "does not parse in line 1",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "nested too deeply",
    "{% if 1 %}" * 900 + "{% endif %}" * 900: "nested too deeply",
    "{% include 'secret' %}": "can't read other templates, got '",
    "{% import 'os' as os %}": "can't read other templates, got '",
    "\n\n{{ messages[0].role.x.y }}": "fails in line 3: UndefinedError",
    "{{ 1 / 0 }}": "fails in line 1: ZeroDivisionError",
    "{{ messages + 1 }}": "fails in line 1: TypeError",
    "{{ raise_exception('Only\nusers') }}": "refuses the messages: Only users. Change the messages, or use another",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "SecurityError, access to attribute '__class__'",
    "{{ raise_exception.__globals__['os'] }}": "SecurityError, access to attribute '__globals__'",
    "{{ strftime_now.__closure__[0] }}": "SecurityError, access to attribute '__closure__'",
    "{{ dict.mro() }}": "SecurityError, access to attribute 'mro'",
    "{{ '{0.__class__.__mro__}'.format(1) }}": "SecurityError, access to attribute '__class__'",
    "{{ messages.append(1) }}": "SecurityError, access to attribute 'append'",
    "{{ namespace(_a=1) }}": "SecurityError, a namespace can't have",
    "{{ lipsum(10) }}": "'lipsum' is undefined",
    "{{ range(10**9)|list }}": "Range too big",
    "{{ 9 ** 99999 }}": "Exceeds the limit (4300 digits)",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "nested too deeply",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": "its text is longer than 16,777,216",
}

LONG = "'x' * 1000"
START = "{% set ns = namespace(x='a', a=(1,), b=(1,)) %}{% for i in range(60) %}"
START += "{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}"
ENDLESS = "{% for i in range(99) %}{% set ns.x = OPERATION %}{% endfor %}"
EXCESSIVE = [
    *(
        ENDLESS.replace("OPERATION", operation)
        for operation in (
            "ns.x ~ ns.x",
            "ns.x + ns.x",
            "'%s%s' % (ns.x, ns.x)",
            "'{0}{0}'.format(ns.x)",
            "ns.x.replace('a', 'aa')",
            "[ns.x, ns.x]|join('')",
        )
    ),
    ENDLESS.replace("OPERATION", "[ns.x, ns.x]") + "{{ ns.x }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set z %}{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}{% endset %}",
    "{% set z %}{% for i in range(99999) %}" + "x" * 9000 + "{% endfor %}{% endset %}",
    *(
        "{{ (" + expression + ")|length }}"
        for expression in (
            "'a' * 10**12",
            "9 ** (9 ** 9)",
            "'a'|center(10**9)",
            "'a'.ljust(10**9)",
            "'%999999999d' % 3",
            "'{:{}}'.format(3, 999999999)",
            "'{x:{w}}'.format_map({'x': 3, 'w': 999999999})",
            "'%*d' % (999999999, 3)",
            "('x' * 99999999).encode()",
            "('a' * 99999).translate({97: 'b' * 99999})",
            "(1).to_bytes(10**9, 'big')",
            "[1]|tojson(indent=' ' * 99999999)",
            f"range(99999)|map('string')|join({LONG})",
            f"range(99999)|join(attribute='real', d={LONG})",
            f"({LONG}).join(range(99999)|map('string'))",
            f"({LONG}).join('a' * 99999)",
            f"('a' * 99999)|replace(new={LONG}, old='a')",
            f"('\n' * 99999)|indent({LONG}, blank=true)",
            "('\n' * 99999)|indent(1000, blank=true)",
            "('\t' * 99999).expandtabs(1000)",
            "('%(a)999d' * 99999) % {'a': 1}",
            "('{0:999}' * 99999).format(1)",
            "('{0}' * 9999).format('x' * 9999)",
            "([1] * 99999)|tojson(indent=999)",
            f"([1] * 99999)|tojson(separators=({LONG}, ':'))",
            f"('a ' * 99999)|wordwrap(1, wrapstring={LONG})",
            f"('http://a.bc ' * 99999)|urlize(rel={LONG})",
            "([[1] * 9999] * 9999)|sum(start=[])",
            "ns.a == ns.b",
            "ns.a in [ns.b]",
            "ns.a is eq(ns.b)",
            "[ns.a]|select('eq', ns.b)|list",
            "[ns.a].index(ns.b)",
            "[ns.a, ns.b]|sort",
            "{ns.a: 1}",
            "{}[ns.a]",
            "{}.get(ns.a)",
            "dict([(ns.a, 1)])",
        )
    ),
]


@pytest.mark.skipif(not MEMORY_FILE.exists(), reason="memory is limited on Linux only")
@pytest.mark.parametrize("source", EXCESSIVE, ids=range(len(EXCESSIVE)))
def test_time_and_memory_are_limited(source, small_limits):
    """A comparison of the nested tuples would take years."""
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(START + source, "dir/chat_template.jinja").render(HELLO)
    text = str(caught.value)
    stopped = r"was stopped, because it needs more than (0.5 seconds|64 MiB of memory)"
    reason = f"({stopped}|does not parse: .* or its constants need too much memory)"
    assert re.match(rf"dir/chat_template.jinja: the chat template {reason}\. Correct it, or use another", text)
    check_refusal(caught.value)


def test_a_stopped_template_does_not_block_the_next_one(small_limits):
    with pytest.raises(ChatTemplateError, match="was stopped"):
        ChatTemplate("{{ 'a' * 10**12 }}").render(HELLO)
    assert ChatTemplate("{{ messages[0].content }}").render(HELLO) == "Hello"


def test_a_crash_of_the_process_is_reported_as_one(tmp_path, monkeypatch):
    program = tmp_path / "_program.py"
    program.write_text("import os\ndef prepare(_):\n    return lambda message: os.kill(os.getpid(), 11)")
    crashing = LimitedProcesses(program, None, seconds=9.0, most_bytes=2**26)
    monkeypatch.setattr(_template, "_renderers", lambda: crashing)
    with pytest.raises(
        ChatTemplateError, match=r"because the process that renders it was ended by SIGSEGV\. Correct it"
    ):
        ChatTemplate("x")


def test_a_template_writes_the_given_date():
    made = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    assert made.run({}, now=datetime(1999, 12, 31)).text == "31 Dec 1999"


def test_filters_and_methods_of_usual_size_are_not_limited():
    lines = "\tline\n" * 5000
    made = ChatTemplate(
        "{{ x|indent(2) == y }}{{ x.expandtabs(4)|length }} {{ x.split('\n')|join('-')|length }} "
        "{{ '%5.1f|%-4s' % (1.25, 'a') }} {{ '{:>4}'.format(7) }} {{ {'a': [1, {}]}|tojson(indent=2) }} "
        "{{ [3, 1]|sort|map('string')|join(', ') }} {{ (1, 2) == (1, 2) }} {{ {(1, 2): 'k'}[(1, 2)] }}"
    )
    text = made.render(HELLO, x=lines, y=lines.replace("\n", "\n  ").rstrip(" "))
    assert text.startswith("True45000 30000   1.2|a       7 ")
    assert text.endswith('{\n  "a": [\n    1,\n    {}\n  ]\n} 1, 3 True k')


@pytest.mark.parametrize("source", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_template_is_refused_with_one_line(source):
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source, "dir/chat_template.jinja").render(HELLO)
    text = str(caught.value)
    assert text.startswith("dir/chat_template.jinja: the chat template ")
    assert MALFORMED[source] in text
    check_refusal(caught.value)


def test_time_is_limited_in_every_thread(monkeypatch):
    processes, caught = limited(seconds=0.05), []
    monkeypatch.setattr(_template, "_renderers", lambda: processes)

    def render():
        with pytest.raises(ChatTemplateError, match=r"needs more than 0.05 seconds") as error:
            ChatTemplate("{% for i in range(99999) %}{% for j in range(999) %}{% endfor %}{% endfor %}").render(HELLO)
        caught.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    render()
    assert len(caught) == 2


def test_large_conversations_are_within_the_limits():
    messages = [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "word " * 500}] * 300
    for family in ("llama3", "qwen3", "gpt_oss", "deepseek_v3"):
        assert len(find_template(files(family)).render(messages)) > 1_400_000


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list with at least one message, got 'hello'"),
        ([], "messages must be a list with at least one message"),
        (["hello"], "message 0 must be a dict such as"),
        ([{"content": "x"}], "the role of message 0 must be a word such as user"),
        ([*HELLO, {"role": "user|><|im_start|", "content": "x"}], "the role of message 1 must be a word"),
        ([{"role": "user"}], "the content of message 0 must be a text, got None"),
        ([{"role": "user", "content": 3}], "the content of message 0 must be a text, or a list"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "because these models read only text, got 'im",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part of the content of message 0 must be"),
        ([{"role": "user", "content": "x", "more": object()}], "contains a value of type object"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls of message 0 must be a list of dicts"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_messages_are_checked(messages, message):
    with pytest.raises(ValueError, match=r"^") as caught:
        ChatTemplate("x").render(messages)
    assert message in str(caught.value)
    check_refusal(caught.value)


def test_a_template_gets_copies():
    """A method of a str subclass, or of another object, is out of reach."""

    class Text(str):
        def secret(self):
            return "secret"

    made = ChatTemplate("{{ messages[0].content.secret }}|{{ messages[0].content }}")
    assert made.render([{"role": "user", "content": Text("a")}]) == "|a"


def test_jinja_is_optional(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ChatTemplateError, match=r"'transformer-zoo\[chat\]'"):
        ChatTemplate("x")


def test_the_length_of_a_template_is_limited(monkeypatch):
    monkeypatch.setattr("transformer.chat._template.MAX_CHARACTERS", 20)
    assert ChatTemplate("x" * 20).render(HELLO) == "x" * 20
    with pytest.raises(ChatTemplateError, match=r"21 .*at most 20\b"):
        ChatTemplate("x" * 21)


PARTS = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("family", sorted({path.stem for path in TEMPLATES.glob("*.jinja")} - {"gemma3"}))
def test_text_parts_are_joined_for_templates_that_expect_a_string(family, role):
    made = ChatTemplate(template(family), special_tokens=(("bos_token", "<s>"), ("eos_token", "</s>")))
    before = [{"role": "user", "content": PARTS}] if role == "assistant" else []
    after = [{"role": "user", "content": PARTS}] if role == "system" else []

    def rendered(content):
        joined = [[{**one, "content": content} for one in group] for group in (before, after)]
        return made.render([*joined[0], {"role": role, "content": content}, *joined[1]])

    try:
        expected = rendered("Hello\nthere")
    except ChatTemplateError:  # no such role
        with pytest.raises(ChatTemplateError):
            rendered(PARTS)
        return
    assert rendered(PARTS) == expected


def test_templates_that_iterate_over_parts_get_parts():
    made = ChatTemplate(template("gemma3"), special_tokens=(("bos_token", "<bos>"),))
    text = made.render([{"role": "user", "content": PARTS}])
    assert text == "<bos><start_of_turn>user\nHellothere<end_of_turn>\n"
    only = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    assert ChatTemplate(only).render([{"role": "user", "content": PARTS}]) == "<Hello><there>"
    assert ChatTemplate(only).render([{"role": "user", "content": "Hello"}]) == "<Hello>"


def test_an_image_for_a_template_of_texts_is_refused():
    messages = [*HELLO, {"role": "user", "content": [{"type": "image"}, *PARTS]}]
    for family in ("llama3", "gemma3"):  # a template that writes contents, and one that iterates over parts
        with pytest.raises(ConfigError, match=r"message 1 has an image.*role user"):
            ChatTemplate(template(family)).render(messages)
    reading = "{% for m in messages %}{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}{% endfor %}"
    assert ChatTemplate(reading).render(messages) == "Hello<image>Hellothere"


def test_results_of_a_function_stay_data():
    """A list that contains not only texts reaches the template unchanged."""
    messages = [*HELLO, {"role": "tool", "content": [{"temperature": 3}]}, {"role": "tool", "content": PARTS}]
    found = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").render(messages)
    assert found == "user: Hello\ntool: [{'temperature': 3}]\ntool: Hello\nthere\n"


def called(arguments, content=None):
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*HELLO, {"role": "assistant", "content": content, "tool_calls": [call]}]


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        CALLS + "{{ c.function.arguments | tojson }}" + END,
        CALLS + "{{ '' ~ c.function.arguments }}" + END,
        CALLS + "{{ '' + c.function.arguments }}" + END,  # fails with an object
        CALLS + "{{ c.function.arguments }}" + END,
        CALLS + '{"city": "{{ c.function.arguments.city }}"}' + END,
        CALLS
        + "{{ (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) }}"
        + END,
    ],
)
@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}', ' {"city":"Köln"}\n'])
def test_call_arguments_are_serialized_to_json_once(source, arguments):
    """As an object or as its JSON text, depending on the template."""
    assert ChatTemplate(source).render(called(arguments)) == '{"city": "Köln"}'


@pytest.mark.parametrize("arguments", ["Köln", "[1]", '{"city": ', 3, '{"a": ' * 100_000])
def test_rejects_call_arguments_that_are_not_an_object(arguments):
    with pytest.raises(ConfigError, match=r"arguments of a tool call of message 1.* got "):
        ChatTemplate(CALLS + "{{ c.function.arguments | tojson }}" + END).render(called(arguments))


@pytest.mark.parametrize("family", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_a_call_without_content_is_a_call_with_an_empty_one(family):
    made = ChatTemplate(template(family), special_tokens=(("bos_token", "<s>"), ("eos_token", "</s>")))
    assert made.render(called({"city": "Köln"})) == made.render(called({"city": "Köln"}, content=""))
