"""Tests of `generate` with slots, a draft model and 8-bit weights, and of options that are invalid with any model."""

import contextlib
import io
import json

import pytest
from training_recipes import record_drawn_run, text_recipe

from transformer.__main__ import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on the same text, `large` and `small`, with different parameters."""
    root = tmp_path_factory.mktemp("runs")
    recipe = text_recipe(root, model={"dropout_rate": 0.0})
    for seed, name in enumerate(("large", "small")):
        record_drawn_run(recipe, root / name, [4], seed=seed)
    return root


@pytest.fixture
def written(runs, capsys):
    """Return the texts of `generate` with these options, and its stderr."""

    def call(*words):
        prompts = ("--prompt", "line", "--prompt", "no more", "--prompt", "of 4")
        options = ("--json", "--step", "newest", "--max-new-tokens", "7")
        assert main(["generate", str(runs / "large"), *prompts, *options, *words]) == 0
        printed = capsys.readouterr()
        return [one["output"] for one in json.loads(printed.out)["results"]], printed.err

    return call


def test_slots_and_a_draft_change_no_text(written, runs):
    plain, _ = written()
    assert written("--slots", "2")[0] == plain
    assert written("--draft", str(runs / "small"), "--draft-tokens", "2")[0] == plain
    assert written("--lookup", "3")[0] == plain


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("words", [("--int8",), ("--int4", "--group-size", "64")])
def test_what_few_bits_save_is_told(written, words):
    _, printed = written(*words)
    assert "embedding/embedding: 1 arrays" in printed
    assert "relative error" in printed


class Terminal(io.StringIO):
    """A terminal that records the pieces that are printed."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def isatty(self):
        return True

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


@pytest.mark.parametrize(
    ("words", "appears"),
    [
        ((), True),
        (("--temperature", "0"), True),
        (("--samples", "2"), True),
        (("--prompt", "no more"), False),
        (("--slots", "1"), False),
        (("--json",), False),
    ],
)
def test_a_text_appears_on_a_terminal_while_it_is_generated(words, appears, runs, capsys, monkeypatch):
    """The text is the one in a pipe, where it is printed at once."""
    monkeypatch.setattr("transformer.generate._streaming.MOST_STEPS", 2)
    given = ("generate", str(runs / "large"), "--prompt", "line", "--step", "newest", "--max-new-tokens", "9", *words)
    assert main(given) == 0
    piped = capsys.readouterr().out
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        assert main(given) == 0
    assert terminal.getvalue() == piped
    assert (len([piece for piece in terminal.pieces if piece.strip()]) > 3) == appears


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slots", "0"), "--slots must be at least 1, got 0"),
        (("--draft", "x", "--draft-tokens", "0"), "--draft-tokens must be at least 1, got 0"),
        (("--lookup", "0"), "--lookup must be at least 1, got 0"),
        (("--lookup", "2", "--draft", "x"), "--draft and --lookup can't be used together. Remove one of them"),
        (("--lookup", "2", "--stream"), "--lookup and --stream can't be used together. Remove one of them"),
        (("--draft", "x", "--slots", "2"), "--slots and --draft can't be used together. Remove one of them"),
    ],
)
def test_what_can_not_be_is_said_before_anything_is_loaded(words, message, capsys):
    assert main(["generate", "no-such-directory", "--prompt", "x", *words]) == 2
    assert message in capsys.readouterr().err
