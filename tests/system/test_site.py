"""The site that `make docs` builds: its reference contains every public name, and its pages download nothing."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from browser import Browser
from package_exports import PACKAGE, assigned, exports, rooms
from package_layers import LAYERS

import transformer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
API = {path.stem: path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md"))}


def load(name: str) -> ModuleType:
    """Import a file of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def referenced() -> list[str]:
    """Return the dotted names that the reference documents, without modules."""
    modules = re.findall(r"^::: (transformer[\w.]*)$", "\n".join(API.values()), re.MULTILINE)
    named = load("hooks").named
    return [name for module in modules for name, is_module in named(module) if not is_module]


def test_every_export_is_in_the_reference_once():
    """Each name has one entry, although two packages may export it, as `transformer.nn` and `transformer.nn.models`."""
    found = [(name.split(".")[1], name.rpartition(".")[2]) for name in referenced()]
    public = set(rooms())
    expected = {(room.split(".")[1], name) for room, path in rooms().items() for name in exports(path)}
    modules = [room for room in public if room.count(".") > 1]
    expected -= {(room.split(".")[1], room.rpartition(".")[2]) for room in modules}
    expected |= {("__main__", name) for name in exports(PACKAGE / "__main__.py")}
    assert set(found) == expected
    assert len(found) - len(set(found)) == 1, (
        "dot_product_attention is the only name with two entries: ours, and the one compatible with Flax"
    )


@pytest.mark.parametrize("package", [room for room, path in rooms().items() if path.name == "__init__.py"])
def test_each_lazy_export_has_an_import_that_tools_can_read(package):
    """The reference and type checkers read files without running them, so names imported lazily need such a line."""
    path = rooms()[package]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    seen = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    late = assigned(path, "_EXPORTS") or {}
    assert {f"{package}.{module}" for module in late} <= seen


def test_every_public_name_is_in_the_table():
    rows = re.findall(r"^\| (`[^|]*`) \|", API["index"], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(transformer.__all__)


def test_the_layer_diagram_matches_the_table():
    layers = load("layers")
    found = {name: level for level, names in layers.layers().items() for name in names}
    assert {
        name.removesuffix("/").removesuffix(".py").replace("/_", "/"): level for name, level in found.items()
    } == LAYERS
    assert layers.PICTURE.read_text() == layers.picture(layers.layers()), "update it: python docs/layers.py"


@pytest.mark.parametrize(
    ("link", "repository", "expected"),
    [
        ("[`a.py`](../transformer/nn/kernels/a.py)", "", "[`a.py`][transformer.nn.kernels.a]"),
        ("[config](../transformer/config/__init__.py)", "", "[config][transformer.config]"),
        ("[`SECURITY.md`](../SECURITY.md)", "", "`SECURITY.md`"),
        ("[how](../SECURITY.md#there)", "", "how (`SECURITY.md`)"),
        ("[how](../SECURITY.md)", "https://x/y/", "[how](https://x/y/blob/HEAD/SECURITY.md)"),
        ("[results/](results/)", "", "results/ (`docs/results`)"),
        (
            "[here](scaling.md#mesh), ![a](images/a.png), [b](#c)",
            "",
            "[here](scaling.md#mesh), ![a](images/a.png), [b](#c)",
        ),
        ("<!-- made -->\n| a |\n<!--\nlong\n-->", "", "\n| a |\n"),
        ("```\n[a](../b.py)\n<!-- kept -->\n```", "", "```\n[a](../b.py)\n<!-- kept -->\n```"),
    ],
)
def test_links_outside_the_site_are_rewritten(link, repository, expected):
    page, config = SimpleNamespace(file=SimpleNamespace(src_uri="a.md")), SimpleNamespace(repo_url=repository)
    assert load("hooks").on_page_markdown(link, page, config, None) == expected


def test_a_formula_in_its_own_paragraph_has_a_box_that_scrolls(monkeypatch):
    converter = ModuleType("latex2mathml.converter")
    converter.convert = lambda text, display: f'<math display="{display}">{text}</math>'
    monkeypatch.setitem(sys.modules, "latex2mathml.converter", converter)
    page = r'<p><span class="arithmatex">\(a &lt; b\)</span></p><div class="arithmatex">\[c\]</div>'
    assert load("hooks").on_page_content(page, None, None, None) == (
        '<p><math display="inline">a < b</math></p>'
        '<div class="formula" tabindex="0"><math display="block">c</math></div>'
    )


def test_a_directive_expands_to_the_exports_of_a_package():
    directives = load("hooks").directives
    assert directives("transformer.nn._masks").split() == [":::", "transformer.nn.Mask"]
    lines = directives("transformer.config").splitlines()
    assert lines[:3] == ["::: transformer.config", "    options:", "      members: []"]
    assert "::: transformer.config.ConfigError" in lines
    assert not [line for line in lines if "._" in line]
    lines = directives("transformer.training").splitlines()
    assert {
        "::: transformer.training.train",
        "::: transformer.training.lora",
        "::: transformer.training.lora.merge",
    } <= {*lines}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site."""
    python = ROOT / ".venv-docs" / "bin" / "python"
    if not (ROOT / ".venv-docs" / "docs").exists():
        pytest.skip(".venv-docs not found: `make docs` creates it")
    folder = tmp_path_factory.mktemp("site")
    command = [python, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390])
def test_formulas_fit_a_phone(site, tmp_path, width):
    """No page of formulas is wider than the screen: a wide formula scrolls in its own box, and is not cut off."""
    browser = Browser(tmp_path)
    try:
        for name in ("mathematics", "report", "architecture"):
            page = browser.page(width=width, height=740, phone=True).open(site / f"{name}.html", drawn="true")
            assert page.js("document.documentElement.scrollWidth") == width, name
            inside = (
                f"[...document.querySelectorAll('math')].filter((e) => e.getBoundingClientRect().right > {width + 1})"
            )
            assert page.js(f"{inside}.every((e) => e.closest('.formula, .md-typeset__scrollwrap'))"), name
            boxes = "[...document.querySelectorAll('.formula')]"
            assert page.js(f"{boxes}.every((e) => e.scrollHeight <= e.clientHeight)"), f"{name}: a formula is cut off"
            page.js(f"for (const box of {boxes}) box.scrollLeft = 1e6")
            ends = f"{boxes}.every((e) => e.scrollLeft + e.clientWidth >= e.scrollWidth - 1)"
            assert page.js(ends), f"{name}: the end of a formula can't be reached"
            if name == "mathematics":
                assert page.js(f"{boxes}.filter((e) => e.scrollWidth > e.clientWidth).length") > 5
    finally:
        browser.close()


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    there = {line.split(" ")[0] for line in inventory.splitlines()}
    assert {*referenced()} <= there, sorted({*referenced()} - there)


@pytest.mark.slow
def test_pages_fetch_nothing_and_formulas_need_no_script(site):
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 30
    for path, page in pages.items():
        fetched = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?(https?:[^\" >]+)", page)
        fetched += re.findall(r"<link (?![^>]*canonical)[^>]*href=\"?(https?:[^\" >]+)", page)
        assert not fetched, (path.name, fetched)
        assert "arithmatex" not in page, path.name
        assert "\\(" not in re.sub(r"<(code|script|annotation|td).*?</\1>", "", page, flags=re.DOTALL), path.name
    assert pages[site / "mathematics.html"].count("<math") > 100
