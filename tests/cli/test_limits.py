"""Tests of the limits for input that would take hours; the errors name an alternative."""

import re

import pytest
from inference_parts import write_models

from transformer.__main__ import main
from transformer.inference import _generate as generating


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("words", [["generate", "{}"], ["inspect", "text", "{}", "--html", "page.html"]])
def test_rejects_a_very_long_source(models, words, monkeypatch, capsys):
    monkeypatch.setattr(generating, "MOST_SOURCE_TOKENS", 5)
    words = [word.format(models["translator"]) for word in words]
    assert main([*words, "--prompt", "the cat sat on the mat"]) == 2
    assert re.fullmatch(r"error: .* at most 5 source tokens.* got 7\b.*`translate`.*\n", capsys.readouterr().err)


def test_rejects_too_many_sources(models, monkeypatch, capsys):
    monkeypatch.setattr(generating, "MOST_PROMPTS", 1)
    assert main(["generate", str(models["translator"]), "--prompt", "the cat", "--prompt", "a dog"]) == 2
    assert re.fullmatch(r"error: .*prompts.* at most 1\b.* got 2\b.*`translate`.*\n", capsys.readouterr().err)


def test_rejects_pictures_of_too_many_weights(models, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("transformer.viz._attention_page.MOST_WEIGHTS", 10)
    words = ["--prompt", "the cat sat on", "--output", str(tmp_path / "new")]
    assert main(["inspect", "text", str(models["writer"]), *words]) == 2
    assert re.search(r"error: .*attention weights.* at most 10\b", capsys.readouterr().err)
    assert not (tmp_path / "new").exists()
