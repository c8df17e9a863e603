"""Tests of remote paths such as s3://bucket/x: every option with a path refuses them before anything is created."""

import dataclasses
import importlib
import pkgutil

import pytest

import transformer.cli
from transformer.__main__ import COMMANDS as NAMES
from transformer.__main__ import main
from transformer.cli._arguments import _path_fields, parse
from transformer.cli._help import is_positional

REMOTE = "gs://bucket/x"
OTHER_TEXTS = {
    *("text", "source", "prompt", "target", "system", "switch", "stop", "labels", "json_schema", "regex", "grammar"),
    *("repo", "license", "message", "host", "api_key", "family", "language", "split", "tasks", "shard", "coordinator"),
}
"""Options of commands that are texts and no paths."""


def commands():
    """Yield each class of options that a command parses."""
    for info in pkgutil.iter_modules(transformer.cli.__path__):
        module = importlib.import_module(f"transformer.cli.{info.name}")
        for kind in vars(module).values():
            own = isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
            if own and "debug" in {field.name for field in dataclasses.fields(kind)}:
                yield kind


COMMANDS = {kind.__name__: kind for kind in commands()}


PATHS = {f"{name}.{field.name}": (kind, field.name) for name, kind in COMMANDS.items() for field in _path_fields(kind)}


def words_with(kind, option, value):
    """Return the required arguments of a command, and one option or positional argument with a value."""
    words = []
    for field in dataclasses.fields(kind):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed or field.name == option:
            words += [] if is_positional(field) else [f"--{field.name.replace('_', '-')}"]
            words += [value if field.name == option else "3"]
    return words


@pytest.mark.parametrize(("kind", "option"), PATHS.values(), ids=PATHS)
def test_each_path_option_rejects_a_url_scheme(kind, option):
    is_named = r"^[A-Z]+" if is_positional(next(one for one in _path_fields(kind) if one.name == option)) else "^--"
    with pytest.raises(ValueError, match=rf"{is_named}.* must be a local path.*got gs://bucket/x"):
        parse(kind, "verb", words_with(kind, option, REMOTE))
    assert parse(kind, "verb", words_with(kind, option, "a:b/x"))


def test_every_path_option_has_a_path_type():
    """A new option of type str is either a path (type `PathText`), or no path and listed here."""
    unknown = {
        f"{name}.{field.name}"
        for name, kind in COMMANDS.items()
        for field in dataclasses.fields(kind)
        if "str" in str(field.type) and field.name not in OTHER_TEXTS
    }
    assert not unknown


def test_all_commands_are_covered():
    """Each command parses one of these classes, except `devices` and those that take a recipe."""
    assert len(COMMANDS) >= len({name for name in NAMES if name.split()[0] not in ("train", "plan", "devices")})


OF_RECIPES = {
    "train --workdir": ["train", "number_words", "--workdir", REMOTE],
    "train --workdir=": ["train", "number_words", f"--workdir={REMOTE}"],
    "train --init": ["train", "number_words", "--init", REMOTE],
    "train RECIPE": ["train", REMOTE],
    "train --data.data-dir": ["train", "number_words", "--data.data-dir", REMOTE],
    "plan RECIPE": ["plan", "train", REMOTE, "--topology", "v5e:1x1"],
    "plan --data.data-dir": ["plan", "train", "number_words", "--topology", "v5e:1x1", "--data.data-dir", REMOTE],
}


@pytest.mark.parametrize("words", OF_RECIPES.values(), ids=OF_RECIPES)
def test_recipe_commands_reject_a_url_scheme(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must be a local path" in line
    assert REMOTE in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["convert", "DIR", REMOTE], ["report", "DIR", "--output", f"{REMOTE}.html"]])
def test_nothing_is_written(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    assert main(words) == 2
    assert "must be a local path" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [tmp_path / "DIR"]
