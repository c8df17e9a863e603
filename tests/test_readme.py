"""What the README shows runs: its Python blocks, and every command, recipe, option and file that it names."""

import pathlib
import re
import shlex

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line.split(" #")[0].strip() for line in re.findall(r"^\.venv/bin/python .*$", TEXT, re.MULTILINE)]


def test_there_is_something_to_test():
    assert len(BLOCKS) >= 2
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command):
    words = shlex.split(command)[1:]
    if words[:2] == ["-m", "transformer"]:
        assert (ROOT / "transformer" / "cli" / "__init__.py").exists()
        from transformer.__main__ import VERBS

        assert words[2] in VERBS
        return
    from transformer.training.overrides import find_recipe, load_recipe_file, override

    assert words[0] == "train.py"
    if words[1] == "--list":
        return
    recipe, about = load_recipe_file(find_recipe(words[1], ROOT, ROOT))
    rest = [word for word in words[2:] if word != "--help"]
    changed = override(recipe, rest, program="train.py", description=about)
    assert (changed != recipe) == bool(rest)


def test_files_it_points_to_are_there():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_make_targets_are_there():
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)", TEXT.split("```")[1]):
        assert re.search(rf"^{target}:", targets, re.MULTILINE), target


def test_every_recipe_is_in_the_table():
    names = {path.stem for path in (ROOT / "configs").glob("*.py")}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", TEXT, re.MULTILINE)
    assert names <= set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_the_table_of_families_is_the_generated_one():
    from transformer.cli.families import markdown

    table = TEXT.partition("<!-- families -->\n")[2].partition("\n<!-- end of families -->")[0]
    assert table == markdown(), "write it anew: .venv/bin/python -m transformer list --markdown"
