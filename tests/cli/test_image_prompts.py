"""`generate --image` and `chat --image`."""

import io
import json
import sys

import pytest
from chat_parts import write_chat_model
from vision_parts import picture, write_vision_model

from transformer.__main__ import main
from transformer.generate import Sampling, generate
from transformer.inference import encode_with_images, open_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for number in (1, 2):
        picture(number).save(folder / f"{number}.png")
    return write_vision_model(folder / "gemma3", "gemma3")


def pictures(model, *numbers):
    return ["--image", *(str(model.parent / f"{number}.png") for number in numbers)]


@pytest.mark.programs(9, reason="a stream has own programs, and makes its cache outside of jit")
def test_generate_continues_a_prompt_about_images(model, capsys):
    prompt = "<start_of_image> is <start_of_image>A"
    options = ["--prompt", prompt, "--max-new-tokens", "5", "--temperature", "0", "--json"]
    assert main(["generate", str(model), *pictures(model, 1, 2), *options]) == 0
    opened = open_model(model)
    ids, pixels = encode_with_images(opened, prompt, [picture(1), picture(2)])
    greedy = Sampling(temperature=0.0)
    (row,) = generate(opened.model, opened.params, [ids], images=[pixels], max_new_tokens=5, sampling=greedy)
    assert json.loads(capsys.readouterr().out)["results"][0]["output"] == opened.tokenizer.decode(row)


@pytest.mark.programs(12, reason="a stream has own programs, and makes its cache outside of jit")
def test_chat_starts_with_images(model, capsys, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b"is it?\nB?"))
    stdin.isatty = lambda: False
    monkeypatch.setattr(sys, "stdin", stdin)
    short = ["--json", "--max-new-tokens", "4"]
    assert main(["chat", str(model), *pictures(model, 1), *short]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["message"], second["message"]) == ("is it?", "B?")
    once = ["--prompt", "is it?"]
    assert main(["answer", str(model), *pictures(model, 1), *once, *short]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["output"] == first["output"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--prompt", "<start_of_image>A"],
            "the prompt has 1 image markers (<start_of_image>), but 2 images are given",
        ),
        (["--prompt", "A", "--slots", "2"], "--slots and --image can't be used together"),
    ],
)
def test_invalid_calls_are_one_line_errors(model, capsys, options, error):
    assert main(["generate", str(model), *pictures(model, 1, 2), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, error in err, err.count("\n")) == ("", True, 1)


def test_a_text_model_rejects_images(model, tmp_path, capsys):
    text = write_chat_model(tmp_path / "smollm")
    for command in (["generate", str(text), "--prompt", "A"], ["chat", str(text)]):
        assert main([*command, *pictures(model, 1)]) == 2
        out, err = capsys.readouterr()
        assert "of the class CausalLM, which does not read images together with text" in err
        assert (out, err.count("\n")) == ("", 1)
    assert main(["generate", "missing", "--prompt", "A", "--image", "missing.png"]) == 2
    assert "image missing.png not found" in capsys.readouterr().err
