"""Tests of the limits for input that would take hours; the errors name an alternative."""

import pytest
from inference_parts import write_models

from transformer.__main__ import main
from transformer.inference import _generating as generating


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("words", [["generate", "{}"], ["inspect", "{}", "--html", "page.html"]])
def test_a_very_long_source(models, words, monkeypatch, capsys):
    monkeypatch.setattr(generating, "MOST_SOURCE_TOKENS", 5)
    words = [word.format(models["translator"]) for word in words]
    assert main([*words, "--prompt", "the cat sat on the mat"]) == 2
    assert capsys.readouterr().err == (
        "error: the prompt is too long: expected at most 5 source tokens, because the time grows with the square of "
        "the length, got 7. Shorten it, or pipe it line by line into `translate`.\n"
    )


def test_very_many_sources(models, monkeypatch, capsys):
    monkeypatch.setattr(generating, "MOST_PROMPTS", 1)
    assert main(["generate", str(models["translator"]), "--prompt", "the cat", "--prompt", "a dog"]) == 2
    assert capsys.readouterr().err == (
        "error: too many prompts: expected at most 1, got 2. Pipe them as lines into `translate`, which reads them in "
        "chunks.\n"
    )


def test_pictures_of_very_many_weights(models, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("transformer.viz._attention_page.MOST_WEIGHTS", 10)
    assert (
        main(["inspect", str(models["writer"]), "--prompt", "the cat sat on", "--output", str(tmp_path / "new")]) == 2
    )
    assert "error: too many attention weights for a page: expected at most 10, got " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
