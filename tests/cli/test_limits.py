"""Input that would take hours is refused with one line that names the way out."""

import pytest
from inference_parts import write_models

from transformer.__main__ import main
from transformer.cli import _texts as texts


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("words", [["generate", "{}"], ["inspect", "{}", "--html", "page.html"]])
def test_a_very_long_source(models, words, monkeypatch, capsys):
    monkeypatch.setattr(texts, "MOST_SOURCE_TOKENS", 5)
    words = [word.format(models["translator"]) for word in words]
    assert main([*words, "--prompt", "the cat sat on the mat"]) == 2
    assert capsys.readouterr().err == (
        "error: the prompt is too long: 7 tokens, but at most 5 of a source are read at once, because time grows with "
        "the square of them. Shorten it, or pipe it line by line into `translate`.\n"
    )


def test_very_many_sources(models, monkeypatch, capsys):
    monkeypatch.setattr(texts, "MOST_PROMPTS", 1)
    assert main(["generate", str(models["translator"]), "--prompt", "the cat", "--prompt", "a dog"]) == 2
    assert capsys.readouterr().err == (
        "error: 2 prompts are too many for one batch: expected at most 1. Pipe the lines into `translate`, which reads "
        "them chunk by chunk.\n"
    )


def test_pictures_of_very_many_weights(models, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("transformer.viz._attention_page.MOST_WEIGHTS", 10)
    assert (
        main(["inspect", str(models["writer"]), "--prompt", "the cat sat on", "--output", str(tmp_path / "new")]) == 2
    )
    assert "error: a page can hold 10 attention weights, but these texts give " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
