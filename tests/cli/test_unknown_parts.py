"""Tests of the warning about words and characters that the tokenizer does not know."""

import io
import sys
from types import SimpleNamespace

import pytest
from inference_parts import write_models

from transformer.__main__ import main
from transformer.cli._texts import UnknownParts
from transformer.data.tokenizers._vocabularies import ByteTokenizer, WordTokenizer

pytestmark = pytest.mark.filterwarnings("always")

KNOWN = "the cat sat"
ODD = "the zebra sat on 😀 zebra"
WARNING = (
    "warning: the tokenizer does not know 3 words or characters of the input; each is replaced by the unknown token or "
    "removed: 'zebra' (2 times), '😀'.\n"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


COMMANDS = {
    "generate": ("writer", ["--prompt", "{}", "--max-new-tokens", "1"]),
    "inspect text": ("writer", ["--prompt", "{}", "--html", "{tmp}/page.html"]),
    "classify text": ("classifier", ["--text", "{}"]),
    "embed text": ("encoder", ["--text", "{}"]),
    "score": ("writer", ["--text", "{}"]),
    "score of a source": ("translator", ["--text", KNOWN, "--source", "{}"]),
    "inspect text of a target": ("translator", ["--prompt", KNOWN, "--target", "{}", "--html", "{tmp}/page.html"]),
}


@pytest.mark.programs(22, reason="masks and maps of attention are computed outside of jit")
@pytest.mark.parametrize("case", COMMANDS)
def test_unknown_words_are_reported_once(models, case, capsys, tmp_path):
    name, words = COMMANDS[case]
    command = case.partition(" of ")[0].split()
    code = main([*command, str(models[name]), *(word.format(ODD, tmp=tmp_path) for word in words)])
    err = capsys.readouterr().err
    assert (code, err) == (0, WARNING)


def test_known_words_are_not_reported(models, capsys):
    assert main(["score", str(models["writer"]), "--text", KNOWN]) == 0
    assert capsys.readouterr().err == ""


def test_a_stream_is_reported_at_its_end(models, capsys, monkeypatch):
    text = "\n".join(["the cat", *(f"w{i} w{i}" for i in range(9)), "the w8"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    options = ["--beam-size", "1", "--max-ratio", "0", "--max-extra", "1"]
    assert main(["translate", str(models["translator"]), *options]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 11
    (warning, _) = err.splitlines()
    assert "does not know 19 words or characters of the input" in warning
    assert warning.endswith(
        ": 'w8' (3 times), 'w0' (2 times), 'w1' (2 times), 'w2' (2 times), 'w3' (2 times) and 4 more."
    )


def test_an_unreadable_text_is_reported_by_its_encoding(recwarn):
    found = UnknownParts(SimpleNamespace(tokenizer=ByteTokenizer()))
    found.add("\udcff")
    found.warn()
    assert not recwarn.list


def test_a_prompt_is_normalized_first():
    tokenizer = WordTokenizer(["forty", "two"], "english_number_words", unknown=True)
    found = UnknownParts(SimpleNamespace(tokenizer=tokenizer))
    found.add("Forty-two")
    assert not found.counts
    found.add("Forty-two", normalize=False)
    assert found.counts == {"Forty-two": 1}
