"""`train RECIPE --help`: the main options with their defaults; `--help-all`: every option."""

import dataclasses
import re

import pytest

from transformer.__main__ import main
from transformer.cli._help import described, field_docs
from transformer.cli._recipe_help import SHOWN
from transformer.config._recipe_files import recipe_files
from transformer.training._overrides import load_recipe_file
from transformer.training._serial import flatten


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(["train", *words])
    assert stop.value.code == 0
    return capsys.readouterr().out


def options(text):
    """Return the options of recipe fields that a help text describes."""
    return re.findall(r"^ +--((?:\w[\w-]*\.)+[\w-]+) ", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["number_words", "shakespeare_cpu", "etth1", "shapes_clip", "llama_1b"])
def test_help_shows_the_main_options_with_the_recipe_s_defaults(name, capsys):
    text = help_of(capsys, name, "--help")
    recipe, about = load_recipe_file(recipe_files()[name])
    shown = options(text)
    assert {"training.steps", "training.seed", "data.batch-size", "optimizer.learning-rate", "model.dtype"} <= set(
        shown
    )
    assert 15 <= len(shown) <= 26
    assert about.splitlines()[0] in text
    assert "--workdir DIR" in text
    assert "--init DIR" in text
    values = flatten(recipe)
    assert f"--help-all lists all {len(values)} fields" in text
    for option in shown:
        shown_text = " ".join(text.rpartition(f"  --{option} ")[2].partition("\n  --")[0].split())
        value = values.get(option.replace("-", "_"), "off")
        assert "None|" not in shown_text
        assert (f"(default: {value})" in shown_text) == (value is not None)


def test_help_shows_values_given_on_the_command_line(capsys):
    text = help_of(capsys, "shakespeare_cpu", "--training.steps", "77", "-h")
    assert "(default: 77)" in text


def test_help_all_lists_every_field(capsys):
    text = help_of(capsys, "shakespeare_cpu", "--help-all")
    recipe, _ = load_recipe_file(recipe_files()["shakespeare_cpu"])
    fields = {field.replace("_", "-"): value for field, value in flatten(recipe).items()}
    assert fields.keys() >= set(options(text)) > {"training.z-loss"}
    unlisted = fields.keys() - set(options(text)) - {"name"}
    assert all(fields[field] in (None, ()) for field in unlisted), "only groups that the recipe lacks, such as lora"
    assert {field.partition(".")[0] for field in options(text)} >= SHOWN.keys() - {"lora"}


@pytest.mark.parametrize("columns", ["1", "20", "200"])
def test_help_fits_terminals_of_any_width(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert "--data.batch-size" in help_of(capsys, "shakespeare_cpu", "--help")


def test_a_field_of_a_base_class_has_its_docstring():
    recipe, _ = load_recipe_file(recipe_files()["shakespeare_cpu"])
    docs = field_docs(type(recipe.data))
    assert set(docs) >= {field.name for field in dataclasses.fields(recipe.data)}
    assert docs["batch_size"] == "windows per step, over all devices and processes"


@pytest.mark.parametrize(
    ("doc", "value", "expected"),
    [
        ("beam size; None: 4", None, ("beam size", "4")),
        ("beam size;\nNone: 4", 2, ("beam size; None: 4", "2")),
        ("a file", None, ("a file", "none")),
        ("files", (), ("files", "none")),
        ("sizes", (2, 3), ("sizes", "2 3")),
    ],
)
def test_the_default_of_an_optional_field_comes_from_its_docstring(doc, value, expected):
    assert described(doc, value) == expected
