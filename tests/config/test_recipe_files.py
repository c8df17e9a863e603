"""Recipe files: search order, errors in them, and the command that trains them."""

import subprocess
import sys
from pathlib import Path

import pytest
from training_recipes import tiny_recipe

from transformer.config import ConfigError
from transformer.training._overrides import find_recipe, load_recipe_file, recipe_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def configs(tmp_path):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "one.py").write_text(
        '"""The one recipe."""\nfrom training_recipes import tiny_recipe\ndef get_config():\n    return tiny_recipe()\n'
    )
    return tmp_path


def test_a_recipe_is_found_by_name_and_path(configs, monkeypatch):
    file = configs / "configs" / "one.py"
    for name in ("one", "one.py", "configs/one", "configs/one.py", str(file), str(file)[:-3]):
        assert find_recipe(name, configs).resolve() == file
    assert recipe_files(configs) == {"one": file}
    recipe, about = load_recipe_file(file)
    assert recipe == tiny_recipe()
    assert about == "The one recipe."


def test_a_recipe_imports_recipes_from_any_folder(configs, tmp_path, monkeypatch):
    """It imports a recipe in its folder, one in configs/ of the current directory, and a bundled one; none of them
    stays imported.
    """
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "near.py").write_text("NAME = 'near'\n")
    (elsewhere / "one.py").write_text("raise RuntimeError('an import of one finds configs/one.py')\n")
    mine = elsewhere / "mine.py"
    mine.write_text(
        "import dataclasses\nfrom configs.near import NAME\nfrom configs.number_words import get_config as base\n"
        "def get_config():\n    from configs.two import STEPS\n"
        "    training = dataclasses.replace(base().training, steps=STEPS)\n"
        "    return dataclasses.replace(base(), name=NAME, training=training)\n"
    )
    (configs / "configs" / "two.py").write_text("STEPS = 7\n")
    monkeypatch.chdir(configs)
    before = {name for name in sys.modules if name.startswith("configs")}
    recipe, _ = load_recipe_file(mine)
    assert (recipe.name, recipe.training.steps) == ("near", 7)
    assert recipe.model == load_recipe_file(find_recipe("number_words"))[0].model
    assert {name for name in sys.modules if name.startswith("configs")} == before
    (elsewhere / "near.py").write_text("NAME = 'changed'\n")
    assert load_recipe_file(mine)[0].name == "changed"
    mine.write_text("from configs.number_word import get_config\n")
    with pytest.raises(ConfigError, match=r"mine.py.*ModuleNotFoundError.*'configs.number"):
        load_recipe_file(mine)


def test_a_local_recipe_replaces_a_bundled_one(configs, monkeypatch):
    bundle = {path.stem: path for path in (ROOT / "configs").glob("*.py")}
    monkeypatch.chdir(configs)
    assert recipe_files() == bundle | {"one": configs / "configs" / "one.py"}
    assert find_recipe("configs/number_words.py") == bundle["number_words"]
    local = configs / "configs" / "number_words.py"
    local.write_text("")
    assert find_recipe("number_words").resolve() == recipe_files()["number_words"] == local


def test_an_unknown_recipe_suggests_the_nearest(configs):
    with pytest.raises(ConfigError, match=r"'configs/on.py'.*'one'\?"):
        find_recipe("configs/on.py", configs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", r"bad.py.*SyntaxError"),
        ("import nothing_of_this_name", r"bad.py.*ModuleNotFoundError"),
        ("x = 1", r"bad.py.*get_config"),
        ("def get_config(): return 1", r"get_config\(\).*transformer.training.Recipe"),
        ("def get_config(): return {}['x']", r"get_config\(\).*KeyError.*'x'"),
    ],
)
def test_a_broken_recipe_file_is_named(tmp_path, text, message):
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe_file(file)


def run_train(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "train.py", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )


def test_invalid_calls_exit_2_with_one_line():
    done = run_train("number_word")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no recipe 'number_word'. Did you mean 'number_words'?")
    assert done.stderr.count("\n") == 1
    debug = run_train("number_words", "--model.d-model", "7", "--debug")
    assert debug.returncode == 2
    assert "Traceback" in debug.stderr
    assert debug.stderr.splitlines()[-1].startswith("error: model: d_model (7) must be")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the first argument must be a recipe or the workdir of a run, got nothing. Try: "),
        (["--model.d-model", "7"], "the first argument must be a recipe or the workdir of a run, got --model.d-model"),
        (["number_words", "--workdir"], "--workdir: expected one argument. --workdir and --init take a directory"),
        (["number_words", "--workdir", "/proc/nowhere"], "/proc/nowhere"),
        (["text_file", "--fast"], "your-text.txt"),
    ],
)
def test_reports_missing_files_in_one_line(arguments, words):
    done = run_train(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_list_prints_every_recipe():
    done = run_train("--list")
    assert done.returncode == 0
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert listed == {path.stem for path in (ROOT / "configs").glob("*.py")}
    assert all(len(line.split()) > 3 for line in done.stdout.splitlines())
