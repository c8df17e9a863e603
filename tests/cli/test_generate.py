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


def words_for(runs, *words):
    prompts = ("--prompt", "line", "--prompt", "no more", "--prompt", "of 4")
    return ["generate", str(runs / "large"), *prompts, "--json", "--step", "newest", "--max-new-tokens", "7", *words]


def texts(printed):
    return [one["output"] for one in json.loads(printed)["results"]]


@pytest.fixture(scope="module")
def plain(runs):
    """The texts without further options."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words_for(runs)) == 0
    return texts(out.getvalue())


@pytest.fixture
def written(runs, capsys):
    """Return the texts of `generate` with these options, and its stderr."""

    def call(*words):
        assert main(words_for(runs, *words)) == 0
        printed = capsys.readouterr()
        return texts(printed.out), printed.err

    return call


@pytest.mark.parametrize("words", [("--slots", "2"), ("--draft", "small", "--draft-tokens", "2"), ("--lookup", "3")])
def test_slots_and_a_draft_change_no_text(written, runs, plain, words):
    assert written(*(str(runs / word) if word == "small" else word for word in words))[0] == plain


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("words", [("--int8",), ("--int4", "--group-size", "64")])
@pytest.mark.programs(70, reason="the report of quantized weights is computed outside of jit")
def test_reports_what_few_bits_save(written, words):
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


@pytest.mark.programs(10, reason="a stream has own programs, and makes its cache outside of jit")
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
def test_reports_what_can_not_be_before_anything_is_loaded(words, message, capsys):
    assert main(["generate", "no-such-directory", "--prompt", "x", *words]) == 2
    assert message in capsys.readouterr().err
