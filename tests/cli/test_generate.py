"""Tests of `generate` with slots, a draft model and 8-bit weights, and of options that are invalid with any model."""

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


@pytest.mark.parametrize("words", [("--int8",), ("--int4", "--group-size", "64")])
def test_what_few_bits_save_is_told(written, words):
    _, printed = written(*words)
    assert "embedding/embedding: 1 arrays" in printed
    assert "relative error" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slots", "0"), "--slots must be at least 1, got 0"),
        (("--draft", "x", "--draft-tokens", "0"), "--draft-tokens must be at least 1, got 0"),
        (("--draft", "x", "--slots", "2"), "--slots and --draft can't be used together. Remove one of them"),
    ],
)
def test_what_can_not_be_is_said_before_anything_is_loaded(words, message, capsys):
    assert main(["generate", "no-such-directory", "--prompt", "x", *words]) == 2
    assert message in capsys.readouterr().err
