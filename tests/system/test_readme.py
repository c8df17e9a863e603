"""The README is short, its Python blocks run, and the files that it links exist; the tables that it links are complete.

For shell blocks see test_shell_blocks.py.
"""

import pathlib
import re

import pytest
from inference_parts import write_models

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES, FAMILIES = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("recipes", "families"))
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_readme_has_blocks_to_test():
    assert len(BLOCKS) >= 2


def test_the_readme_has_at_most_900_words():
    assert len(TEXT.split()) <= 900


@pytest.mark.programs(150, reason="a reader runs these blocks outside of jax.jit")
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, tmp_path):
    if '"gpt2"' in block:  # a tiny model of the same family, which needs no network
        block = block.replace('"gpt2"', repr(str(write_models(tmp_path)["writer"])))
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_table_lists_every_recipe():
    names = {path.stem for path in (ROOT / "configs").glob("*.py")}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", RECIPES, re.MULTILINE)
    assert names <= set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_the_table_of_families_is_current():
    from transformer.cli._list import markdown

    table = FAMILIES.partition("<!-- families -->\n")[2].partition("\n<!-- end of families -->")[0]
    assert table == markdown(), "update it with the output of: .venv/bin/python -m transformer list --markdown"
