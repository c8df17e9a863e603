"""Tests of empty paths on the command line."""

import pytest

from transformer.__main__ import main
from transformer.cli._arguments import parse
from transformer.cli._score import ScoreTexts

OPTIONS = {
    "train --workdir": ["train", "number_words", "--workdir", ""],
    "train --workdir=": ["train", "number_words", "--workdir="],
    "train --init": ["train", "number_words", "--init", ""],
    "average --to": ["average", "run", "--to", ""],
    "report --output": ["report", "run", "--output", ""],
    "inspect --html": ["inspect", "text", "run", "--prompt", "a", "--html="],
}


@pytest.mark.parametrize("words", OPTIONS.values(), ids=OPTIONS)
def test_an_empty_option_is_an_error(words, capsys):
    """An empty path would mean the current directory, or silently select the default."""
    assert main(words) == 2
    option = next(word for word in words if word.startswith("--") and word != "--prompt").rstrip("=")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {option} must name a ")
    assert ", got ''. Remove " in line


@pytest.mark.parametrize("words", [["generate", "", "--prompt", "a"], ["report", "run", ""], ["convert", "run", ""]])
def test_an_empty_directory_is_an_error(words, capsys):
    assert main(words) == 2
    assert f"error: {words[0]} needs a file or a directory, got ''. Pass a path." in capsys.readouterr().err


def test_a_text_may_be_empty():
    """Only paths must not be empty."""
    assert parse(ScoreTexts, "score", ["run", "--text", "a", "--text", ""]).text == ("a", "")
