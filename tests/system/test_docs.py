"""The pages of docs/ are correct: their Python blocks run, their links lead to files, and their quoted code exists.

A page can quote code: a list item with file and link, followed by consecutive lines of that file.

- Computed in [`transformer/nn/_moe.py`](../transformer/nn/_moe.py): `activate(self.activation, up, gate)`
"""

import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "results"]  # parts of results.md
OTHERS = ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")
# Target and anchor of a link or an image. Not applied to code.
LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
NAMED = re.compile(r"`((?:transformer|tests|benchmarks|reliability|configs|examples|notebooks)/[a-z0-9_/.\-]+)`")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
QUOTE = re.compile(r"^- Computed in \[`([^`]+)`\]\(([^)]+)\): ((?:`[^`]+` ?)+)$", re.MULTILINE)
ROW_TABLE = re.compile(r"^\| (S\d\.\d) \| .* \| (`test_.*`) \|$", re.MULTILINE)


def read(page):
    return page.read_text(encoding="utf-8")


def blocks(text):
    """Return the Python blocks, each after enough empty lines for errors to report the line number of the page."""
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text[: match.start(1)].count("\n") + match[1] for match in found]


def quotes(text):
    """Return (file, link, lines of code) of every quotation."""
    return [(file, link, re.findall(r"`([^`]+)`", code)) for file, link, code in QUOTE.findall(text)]


by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
SLOW = {"audio", "chat", "colab", "decoding", "fine-tuning", "long-sequences", "mathematics", "migrate", "pretrained"}
SLOW |= {"reuse", "vectors", "vision"}
"""pages whose blocks train models or compile many programs"""


@pytest.mark.programs(150, reason="a reader runs these blocks outside of jax.jit")
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p.stem in SLOW else (), id=p.stem) for p in PAGES]
)
def test_python_blocks_run_in_order_in_one_namespace(page):
    namespace = {"__name__": page.stem}
    with jax.numpy_rank_promotion("allow"):  # the default of JAX, which readers use
        for block in blocks(read(page)):
            exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / f"{name}.md" for name in OTHERS)], ids=lambda page: page.stem)
def test_links_and_images_lead_to_files(page):
    targets = LINK.findall(FENCED.sub("", read(page)))
    for target, anchor in targets:
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}, which does not exist"
        assert there.resolve().is_relative_to(ROOT), f"{page.name} links to {target}, outside of the repository"
        if anchor and there.suffix == ".md":
            assert anchor[1:] in anchors(read(there)), (
                f"{page.name} links to {target}{anchor}, but there is no such heading"
            )


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / f"{name}.md" for name in OTHERS)], ids=lambda page: page.stem)
def test_files_named_in_a_page_exist(page):
    for file in NAMED.findall(FENCED.sub("", read(page))):
        assert (ROOT / file).exists(), f"{page.name} mentions {file}, which does not exist"


def test_test_files_named_in_scripts_exist():
    """Test files that the scripts of continuous integration and the tool settings mention exist."""
    scripts = [*sorted((ROOT / ".ci").iterdir()), *(ROOT / name for name in ("Makefile", "pyproject.toml"))]
    named = [(script.name, file) for script in scripts for file in re.findall(r"tests/[\w/]+\.py", read(script))]
    floor = read(ROOT / ".ci" / "floor").partition("tests=(")[2].partition(")")[0].split()
    named += [("floor", f"tests/{room}/test_{name}.py") for room, _, name in (word.rpartition("/") for word in floor)]
    assert len(floor) > 20
    assert not [(script, file) for script, file in named if not (ROOT / file).is_file()]


def anchors(text):
    """Return the anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@by_page
def test_quoted_lines_occur_once_in_their_file(page):
    text = read(page)
    assert text.count("\n- Computed") == len(quotes(text)), "a quotation does not have the checked format"
    for file, link, code in quotes(text):
        assert (page.parent / link).resolve() == ROOT / file, (
            f"{page.name}: the link for {file} leads to a different file"
        )
        lines = r"\n *".join(map(re.escape, code))
        times = len(re.findall(rf"^ *{lines}$", read(ROOT / file), re.MULTILINE))
        assert times == 1, f"{page.name} quotes {code}, which occurs {times} times in {file}"


def test_the_checked_patterns_find_blocks_and_quotes():
    """The patterns find blocks and quotations; otherwise the tests above would check nothing."""
    text = read(ROOT / "docs" / "mathematics.md")
    assert len(blocks(text)) == text.count("```python") >= 10
    assert len(quotes(text)) == text.count("Computed in") >= 30
    assert LINK.findall("see [a](b.md#c), ![d](images/e.png)") == [("b.md", "#c"), ("images/e.png", "")]
    assert anchors("# From the formula, to `it`\n") == ["from-the-formula-to-it"]


def test_the_mathematics_table_lists_the_tests_of_each_row():
    """The table in docs/mathematics.md has exactly these rows, each with the tests whose names begin with it."""
    table = dict(ROW_TABLE.findall(read(ROOT / "docs" / "mathematics.md")))
    sources = "".join(map(read, sorted((ROOT / "tests").rglob("test_*.py"))))
    expected: dict[str, list[str]] = {}
    for name in re.findall(r"^def (test_s\d_\d_\w+)", sources, re.MULTILINE):
        row = "S" + name[6:9].replace("_", ".")
        expected.setdefault(row, []).append(name)
    assert {row: re.findall(r"`(\w+)`", names) for row, names in table.items()} == dict(sorted(expected.items()))
    wanted = {1: 6, 2: 9, 3: 4, 4: 3}
    assert list(table) == [f"S{text}.{row}" for text, rows in wanted.items() for row in range(1, rows + 1)]
