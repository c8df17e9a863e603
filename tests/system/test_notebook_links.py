"""One command writes the address of the repository into all notebooks and pages."""

import importlib.util
import re
import shutil
import tomllib

import nbformat
import pytest
from notebook_parts import PATHS, ROOT, code_of, read

FILES = ["pyproject.toml", "README.md", "docs/colab.md", *(f"notebooks/{path.name}" for path in PATHS)]


@pytest.fixture(scope="module")
def links():
    spec = importlib.util.spec_from_file_location("notebooks_links", ROOT / "notebooks" / "links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_committed_files_agree_with_pyproject(links):
    assert links.main(["--check"]) == 0


def test_every_notebook_has_a_link(links):
    assert set(links.SUBJECTS) == {path.stem for path in PATHS}


def test_one_command_fills_in_the_address(links, copy, capsys):
    address = "https://github.com/somebody/some.zoo"
    assert links.main([f"{address}.git"], root=copy) == 0
    assert "wrote: docs/colab.md" in capsys.readouterr().out
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    assert project["urls"] == {"Repository": address}
    assert (
        project["optional-dependencies"]
        == (tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    )
    for path in PATHS:
        text = (copy / "notebooks" / path.name).read_text()
        assert f'\nREPOSITORY = "{address}"' in code_of(read(copy / "notebooks" / path.name), "setup")
        assert text == nbformat.writes(nbformat.reads(text, as_version=4)) + "\n"
        page = (copy / "docs" / "colab.md").read_text()
        assert f"(https://colab.research.google.com/github/somebody/some.zoo/blob/main/notebooks/{path.name})" in page
        assert f"?src={address}/blob/main/notebooks/{path.name})" in page
        assert (
            f"{address.removeprefix('https://')}/blob/main/notebooks/{path.name})" in (copy / "README.md").read_text()
        )
    for name in ("README.md", "docs/colab.md"):  # the badge has a path relative to the page
        (image,) = set(re.findall(r"!\[Open in Colab\]\(([^)]+)\)", (copy / name).read_text()))
        assert ((ROOT / name).parent / image).exists()
    assert links.main(["--check"], root=copy) == 0
    (copy / "notebooks" / PATHS[0].name).write_text(PATHS[0].read_text())
    assert links.main(["--check"], root=copy) == int(code_of(read(PATHS[0]), "setup").find(address) < 0)


def test_a_new_address_replaces_the_previous_one(links, copy):
    links.main(["https://github.com/somebody/zoo"], root=copy)
    links.main(["https://git.example.org/group/zoo"], root=copy)
    assert tomllib.loads((copy / "pyproject.toml").read_text())["project"]["urls"] == {
        "Repository": "https://git.example.org/group/zoo"
    }
    assert '"https://git.example.org/group/zoo"' in code_of(read(copy / "notebooks" / PATHS[0].name), "setup")
    assert "github.com/somebody" not in "".join((copy / name).read_text() for name in FILES)
    # Colab opens only repositories on github.com.
    assert "colab.research.google.com" not in (copy / "docs" / "colab.md").read_text()


@pytest.mark.parametrize("address", ["", "git@github.com:somebody/zoo", "https://github.com", 'https://a/b"c'])
def test_rejects_an_invalid_address(links, copy, address, capsys):
    with pytest.raises(SystemExit):
        links.main([address], root=copy)
    assert "expected an address such as https://github.com/OWNER/NAME" in capsys.readouterr().err


def test_the_badge_is_a_file_of_the_repository():
    assert (ROOT / "docs" / "images" / "open-in-colab.svg").read_text().startswith("<svg ")
