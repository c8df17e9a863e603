"""The commands `chat`, `answer` and `generate`, with options that generate text in pieces."""

import io
import json
import os
import re
import signal
import sys

import pytest
from chat_parts import write_chat_model

from transformer.__main__ import main
from transformer.chat import Chat
from transformer.cli import _chat as command
from transformer.generate import Sampling
from transformer.inference import open_model

pytestmark = pytest.mark.programs(20, reason="a stream has own programs, and makes its cache outside of jit")

SHORT = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("models") / "smollm")


@pytest.fixture(scope="module")
def chat(model):
    opened = open_model(model)
    return Chat(opened.model, opened.params, opened.tokenizer)


@pytest.fixture
def talk(model, monkeypatch, capsys):
    """Run `chat` with these lines as stdin; return exit code, stdout and stderr."""

    def call(*lines, options=SHORT):
        stdin = io.TextIOWrapper(io.BytesIO("\n".join(lines).encode()))
        stdin.isatty = lambda: False
        monkeypatch.setattr(sys, "stdin", stdin)
        return main(["chat", str(model), *options]), *capsys.readouterr()

    return call


def user(text):
    return {"role": "user", "content": text}


def test_chat_holds_a_conversation(talk, chat):
    """The second answer depends on the first turn; /reset forgets it; /system begins a new one."""
    code, out, _ = talk(
        "Hello", "And <|im_end|>?", "/reset", "Hello", "/system Be brief", "Hello", options=("--json", *SHORT)
    )
    assert code == 0
    got = [json.loads(line) for line in out.splitlines()]
    first = chat.reply([user("Hello")], max_new_tokens=6)
    second = chat.reply([user("Hello"), first.message, user("And <|im_end|>?")], max_new_tokens=6)
    system = chat.reply([{"role": "system", "content": "Be brief"}, user("Hello")], max_new_tokens=6)
    assert [one["output"] for one in got] == [first.text, second.text, first.text, system.text]
    assert got[0] == {"message": "Hello", "output": first.text, "finish": first.finish, "tokens": len(first.tokens)}


def test_chunks_are_printed_as_they_arrive(talk, chat):
    code, out, err = talk("//Hello", "", "/help")
    assert (code, err) == (0, "")
    assert out.startswith(chat.reply([user("/Hello")], max_new_tokens=6).text + "\n/help")
    assert all(name in out for name in command.COMMANDS)


def test_a_conversation_is_saved(talk, tmp_path):
    file = tmp_path / "conversation.json"
    code, out, err = talk("Hello", f"/save {file}", "Again", f"/save {file}")
    assert code == 0
    saved = json.loads(file.read_text())
    assert [one["role"] for one in saved] == ["user", "assistant"] * 2
    assert out == f"{saved[1]['content']}\n{saved[3]['content']}\n"
    assert "wrote 4 messages" in err
    code, _, err = talk(f"/save {file}")
    assert (code, err.count("\n")) == (2, 1)
    assert "exists, and this conversation did not write it" in err


def test_ctrl_c_stops_the_answer_and_not_the_program(talk, monkeypatch, chat):
    """The first Ctrl-C ends the answer after the piece that is being computed; the next message is answered."""
    shown, begun = [], command.ReplyCommand.start_reply

    def interrupted(*given):
        stream = begun(*given)
        if shown:
            return stream
        shown.append(1)

        def pieces():
            for piece in stream:
                signal.raise_signal(signal.SIGINT)
                yield piece

        class Interrupted:
            reply = property(lambda self: stream.reply)
            __iter__ = lambda self: pieces()  # noqa: E731

        return Interrupted()

    monkeypatch.setattr(command.ReplyCommand, "start_reply", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = talk("Hello", "/reset", "Hello", options=("--max-new-tokens", "40"))
    whole = chat.reply([user("Hello")], max_new_tokens=40).text
    stopped, _, rest = out.partition(" [stopped]\n")
    assert code == 0
    assert whole.startswith(stopped)
    assert len(stopped) < len(whole)
    assert rest == f"{whole}\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_exits_immediately():
    with command.interruptions() as event:
        signal.raise_signal(signal.SIGINT)
        assert event.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_terminal_continues_after_an_error(model, monkeypatch, capsys):
    """Ctrl-C at the prompt prints a hint, Ctrl-D ends the conversation; redirected stdout has only answers."""
    typed = iter(["/nothing", KeyboardInterrupt(), "Hello", EOFError()])

    prompts = []

    def read(prompt):
        prompts.append(prompt)
        value = next(typed)
        if isinstance(value, BaseException):
            raise value
        return value

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["chat", str(model), *SHORT]) == 0
    out, err = capsys.readouterr()
    assert "error: unknown command '/nothing'" in err
    assert "Ctrl-D ends the conversation" in err
    assert out.strip()
    assert out.count("\n") == 1
    assert prompts == [""] * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("chat", "MODEL", "--temperature", "-1"), "--temperature must be a number from 0 to 1000"),
        (("chat", "MODEL", "--repetition-penalty", "0"), "--repetition-penalty must be a number from 0.001 to 1000"),
        (("chat", "MODEL", "--switch", "x"), "--switch must be NAME=VALUE, such as enable_thinking=false, got 'x'"),
        (("chat", "MODEL", "--template", "no-such-file"), "no-such-file"),
        (("generate", "MODEL", "--prompt", "x", "--system", "y"), "generate has no option --system"),
        (("generate", "MODEL", "--prompt", "x", "--stream", "--json"), "--stream and --json can't be used together"),
        (("answer", "MODEL", "--prompt", "x", "--stream", "--log-probabilities"), "--stream and --log-probabilities"),
        (("answer", "MODEL", "--prompt", "x", "--slots", "1"), "answer has no option --slots"),
        (("generate", "MODEL", "--prompt", "x", "--samples", "0"), "--samples must be at least 1, got 0"),
        (("generate", "MODEL", "--prompt", "x", "--stop", ""), "--stop must be a text of at least one character"),
        (("generate", "MODEL", "--prompt", "x", "--stream", "--slots", "1"), "--slots and --stream can't be used"),
    ],
)
def test_invalid_options_are_refused_with_one_line(words, message, model, capsys):
    assert main([str(model) if word == "MODEL" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_template_error_names_its_file(model, tmp_path, capsys):
    file = tmp_path / "my.jinja"
    file.write_text("{{ raise_exception('no system message, please') }}")
    assert main(["answer", str(model), "--prompt", "x", "--template", str(file)]) == 2
    assert f"{file}: the chat template refuses the messages: no system message, please" in capsys.readouterr().err


class TestGenerate:
    """Options of `generate` and `answer`."""

    def call(self, model, capsys, *words, command="generate"):
        assert main([command, str(model), "--max-new-tokens", "9", *words]) == 0
        return capsys.readouterr().out

    def test_the_stream_equals_the_full_text(self, model, capsys):
        words = ("--prompt", "Hello", "--prompt", "The answer", "--temperature", "0")
        assert self.call(model, capsys, *words, "--stream") == self.call(model, capsys, *words)

    def test_answers_a_single_message(self, model, capsys, chat):
        messages = [{"role": "system", "content": "Be brief"}, user("Hello")]
        expected = chat.reply(messages, max_new_tokens=9, sampling=Sampling(temperature=0.0, presence_penalty=1.0))
        words = ("--system", "Be brief", "--prompt", "Hello", "--presence-penalty", "1")
        assert self.call(model, capsys, *words, command="answer") == f"{expected.text}\n"
        assert self.call(model, capsys, *words, "--stream", command="answer") == f"{expected.text}\n"

    def test_samples_and_log_probabilities(self, model, capsys):
        words = ("--prompt", "Hello", "--samples", "2", "--seed", "4")
        results = json.loads(self.call(model, capsys, *words, "--log-probabilities"))["results"]
        assert [len(one["tokens"]) == len(one["log_probabilities"]) for one in results] == [True, True]
        assert results[0]["output"] != results[1]["output"]
        again = json.loads(self.call(model, capsys, *words, "--json"))["results"]
        assert [one["output"] for one in again] == [one["output"] for one in results]
        assert "tokens" not in again[0]

    def test_a_stop_string(self, model, capsys):
        whole = self.call(model, capsys, "--prompt", "Hello", "--temperature", "0")
        stop = whole[len("Hello") + 2 : len("Hello") + 4]
        cut = self.call(model, capsys, "--prompt", "Hello", "--temperature", "0", "--stop", stop)
        assert cut == whole[: whole.index(stop, len("Hello"))] + "\n"


def test_a_template_path_that_is_not_a_file_is_an_error(talk, tmp_path):
    """Reading a pipe would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        code, _, err = talk("Hi", options=(*SHORT, "--template", str(path)))
        assert code == 2
        assert re.fullmatch(rf"error: {re.escape(str(path))} must be a file.*\n", err)
