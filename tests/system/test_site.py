"""The site that `make docs` makes of docs/: every public name is in its reference, and its pages fetch nothing."""

import importlib.util
import os
import re
import subprocess
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from docstring_members import members
from package_layers import LAYERS

import transformer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
API = {path.stem: path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md"))}


def load(name: str) -> ModuleType:
    """A file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public_names() -> set[str]:
    """Dotted names of all modules, classes, functions and constants, and of what is in the classes; but for constants
    that are given several at a time (`A, B = 1, 2`), which Griffe does not read.
    """
    found = set()
    for path in sorted((ROOT / "transformer").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module not in ("transformer", "transformer.nn"):  # these pass on what others define
            _, *others = members(path.read_text(encoding="utf-8"))
            found |= {module, *(f"{module}.{member.name}" for member in others if not re.search(r"__|\(", member.name))}
    return found


def test_every_layer_is_in_the_reference_once():
    directives = re.findall(r"^::: transformer\.([\w.]+)$", "\n".join(API.values()), re.MULTILINE)
    inner = {unit for unit in LAYERS if "/" in unit and unit.partition("/")[0] in LAYERS}  # come with their folder
    assert sorted(directives) == sorted(unit.replace("/", ".") for unit in LAYERS.keys() - inner)


def test_what_the_package_offers_is_in_the_table():
    rows = re.findall(r"^\| (`[^|]*`) \|", API["index"], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(transformer.__all__)


def test_the_picture_of_the_layers_is_that_of_the_table():
    layers = load("layers")
    assert {
        name.removesuffix("/").removesuffix(".py"): level for level, names in layers.layers().items() for name in names
    } == LAYERS
    assert layers.PICTURE.read_text() == layers.picture(layers.layers()), "draw it anew: python docs/layers.py"


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
def test_links_that_leave_the_site(link, repository, expected):
    page, config = SimpleNamespace(file=SimpleNamespace(src_uri="a.md")), SimpleNamespace(repo_url=repository)
    assert load("hooks").on_page_markdown(link, page, config, None) == expected


def test_a_directive_is_spelled_out_to_the_names_that_a_file_defines():
    lines = load("hooks").directives("transformer.config").splitlines()
    assert lines[:2] == ["::: transformer.config", "    options:"]
    assert "ConfigError" not in lines[2], "__init__ passes it on, checks.py defines it"
    there = lines.index("::: transformer.config.checks")
    assert "ConfigError" in lines[there + 2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built anew."""
    python = ROOT / ".venv-docs" / "bin" / "python"
    if not (ROOT / ".venv-docs" / "docs").exists():
        pytest.skip("there is no .venv-docs to build the site with: `make docs` makes it")
    folder = tmp_path_factory.mktemp("site")
    command = [python, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    there = {line.split(" ")[0] for line in inventory.splitlines()}
    assert public_names() <= there, sorted(public_names() - there)


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
