"""Counts of what makes the package easy or hard to read."""

import pytest

from reliability.counts import annotations_any, comment_share, fields_of, files_in_circles, main, shared_names, sources

CIRCLE = "def f():\n    from transformer.inference._{} import g\n    return g\n"


@pytest.fixture
def checkout(tmp_path):
    def write(**files):
        for name, text in files.items():
            path = tmp_path / "transformer" / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return sources(tmp_path)

    return write


def test_an_import_inside_a_function_closes_a_cycle(checkout):
    files = {"inference___a": CIRCLE.format("b"), "inference___b": CIRCLE.format("c"), "inference___d": ""}
    assert files_in_circles(checkout(**files, inference___c=CIRCLE.format("d"))) == {}
    assert files_in_circles(checkout(**files, inference___c=CIRCLE.format("a"))) == {"inference": 3}


def test_an_import_from_another_package_closes_no_cycle(checkout):
    files = checkout(chat___a=CIRCLE.format("b"), inference___b="import transformer.chat._a\n")
    assert files_in_circles(files) == {}


def test_counts_fields_of_parts(checkout):
    part = "class Part:\n    a: int\n    b: int = 1\n"
    files = checkout(config___model=part + "class Whole:\n    c: int\n    part: Part | None = None\n")
    assert fields_of(files, "Whole", parts=False) == 2
    assert fields_of(files, "Whole", parts=True) == 3


def test_counts_types_comments_and_names(checkout):
    text = "def f(a: Any, b: list[Any]) -> Any:\n    # why\n    return a  # noqa: E501\n"
    files = checkout(serve___x=text, training___x="", training___y="")
    assert annotations_any(files) == 2
    alias = checkout(serve___names="Leaf: TypeAlias = Any\n", serve___x="def f(a: Leaf) -> int: ...\n")
    assert annotations_any(alias) == 1
    assert comment_share(files) == "50.0"
    assert shared_names(files) == 2


def test_reports_a_folder_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["counts", str(tmp_path)])
    with pytest.raises(SystemExit, match="no Python files"):
        main()
