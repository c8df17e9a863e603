"""Tests of `inspect chat`: the page of a conversation and its answer, a base model next to it, and errors."""

import dataclasses
import json

import numpy as np
import pytest
from attention_page_parts import data_of, weights_of
from chat_parts import write_chat_model

from transformer.__main__ import main
from transformer.chat import Chat
from transformer.cli._models import ModelCommand
from transformer.generate import Sampling
from transformer.inference import open_model
from transformer.nn.models import Classifier
from transformer.viz._attention_weights import printable

MESSAGE = "Hello <|im_end|>"
MESSAGES = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": MESSAGE}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("models") / "smollm")


@pytest.fixture
def call(capsys):
    """Run `inspect chat` with a message; return exit code, stdout and stderr."""

    def run(directory, *words):
        code = main(["inspect", "chat", str(directory), "--prompt", MESSAGE, *words])
        return code, *capsys.readouterr()

    return run


@pytest.mark.programs(19, reason="masks and maps of attention are computed outside of jit")
def test_the_page_shows_the_conversation_and_the_answer(model, call, tmp_path):
    """The tokens are those that `Chat` reads and generates; the answer begins after the generation prompt."""
    page = tmp_path / "page.html"
    words = ("--system", "Be brief", "--max-new-tokens", "5", "--html", str(page))
    code, out, err = call(model, *words, "--json")
    assert (code, err) == (0, "")
    opened = open_model(model)
    chat = Chat(opened.model, opened.params, opened.tokenizer)
    given = chat.encode(MESSAGES, add_generation_prompt=True).ids
    reply = chat.reply(MESSAGES, max_new_tokens=5, sampling=Sampling(temperature=0.0))
    data = data_of(page.read_text())
    assert data["words"]["decoder"] == [*map(printable, opened.tokenizer.tokens([*given, *reply.tokens]))]
    assert data["words"]["decoder"].count("<|im_end|>") == 2, "only those of the template are tokens"
    assert data["writtenFrom"] == len(given) < len(data["words"]["decoder"])
    assert dict(data["texts"]) == {"System message": "Be brief", "Prompt": MESSAGE, "Answer": reply.text}
    weights = weights_of(data, "decoder", "self", 1)
    np.testing.assert_allclose(np.nansum(weights, -1), 1, atol=0.03)
    assert np.isnan(weights[0][0, 1:]).all()
    assert json.loads(out)["target"] == reply.text
    code, out, _ = call(model, *words)
    assert (code, out) == (0, f"{reply.text}\n{page}\n")


@pytest.mark.programs(37, reason="masks and maps of attention are computed outside of jit")
def test_a_base_model_without_a_template_is_shown_alongside(model, call, tmp_path):
    base, page = write_chat_model(tmp_path / "base", seed=1), tmp_path / "page.html"
    settings = json.loads((base / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "integrity.json").unlink(missing_ok=True)
    words = ("--max-new-tokens", "3", "--html", str(page), "--compare")
    assert call(model, *words, str(base))[0] == 0
    data = data_of(page.read_text())
    assert [one["name"] for one in data["panels"]] == [str(model), str(base)]
    other = write_chat_model(tmp_path / "other", "olmo2")
    code, _, err = call(model, *words, str(other))
    assert (code, err.count("\n")) == (2, 1)
    assert "--compare needs a model with the same tokenizer" in err
    code, _, err = call(base, "--html", str(tmp_path / "new.html"))
    assert (code, err.count("\n")) == (2, 1)
    assert f"{base} has no chat template" in err
    template = tmp_path / "my.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ end }}")
    words = (
        "--template",
        str(template),
        "--switch",
        "end=!",
        "--max-new-tokens",
        "1",
        "--output",
        str(tmp_path / "maps"),
    )
    assert call(base, *words, "--json")[0] == 0
    assert len(list((tmp_path / "maps").glob("*.png"))) == 2, "one picture per layer"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--switch", "x"), "--switch must be NAME=VALUE"),
        (("--target", "x"), "inspect chat has no option --target"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1, got 0."),
    ],
)
def test_invalid_options_are_refused_before_the_model_is_loaded(words, message, call):
    code, out, err = call("nowhere", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_rejects_models_that_cannot_chat(model, call, monkeypatch):
    opened = open_model(model)
    classifier = dataclasses.replace(opened, model=Classifier(opened.model.config))
    monkeypatch.setattr(ModelCommand, "load", lambda self: classifier)
    code, _, err = call(model)
    assert (code, err.count("\n")) == (2, 1)
    assert "a conversation needs a causal model; " in err
    assert "contains a model of type Classifier. Pass the directory of a model trained for conversations." in err
