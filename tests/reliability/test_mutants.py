"""Tests of `make mutants`: the changes, their sample, the choice of tests, and the table."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliability import mutants
from reliability.imports import distances, imports, nearest_tests

TEXT = '''
"""A docstring with 3 numbers."""
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import a

def f(x: int | None = 2, *, flag=True) -> int:
    """Return 1."""
    if x < 3 and not flag:
        raise ValueError(f"got {x + 1}, expected {4}")
    for é in [x]:
        g(x)
        break
    return x * 2 if x else -x
'''


def changes(text):
    return {(one.before, one.after) for one in mutants.mutants("a.py", text)}


def test_the_assertion_of_a_zip_is_not_changed():
    assert changes("zip(a, b, strict=True)\n") == {("zip(a, b, strict=True)", "pass")}


def test_mutations_change_only_executed_code():
    assert changes(TEXT) == {
        ("2", "(3)"),
        ("True", "(False)"),
        ("x < 3 and not flag", "(x < 3 or not flag)"),
        ("x < 3", "(x <= 3)"),
        ("3", "(4)"),
        ("not flag", "(flag)"),
        ("g(x)", "pass"),
        ("break", "continue"),
        ("x * 2", "(x + 2)"),
        ("x * 2 if x else -x", "(x * 2 if not x else -x)"),
        ("-x", "(x)"),
        ("return x * 2 if x else -x", "return None"),
    }


def test_each_mutant_differs_in_exactly_one_place():
    original = ast.dump(ast.parse(TEXT))
    found = mutants.mutants("a.py", TEXT)
    programs = {ast.dump(ast.parse(one.apply(TEXT))) for one in found}
    assert original not in programs
    assert len(programs) == len(found)


@pytest.mark.parametrize("room", mutants.ROOMS)
def test_mutants_of_the_package_can_be_parsed(room):
    drawn = mutants.sample([room], 30, 1)
    assert len(drawn) == 30
    for one in drawn:
        text = (mutants.ROOT / one.path).read_text(encoding="utf-8")
        assert mutants.room_of(one.path) == room
        assert ast.dump(ast.parse(one.apply(text))) != ast.dump(ast.parse(text)), one.name


def test_a_sample_depends_only_on_the_seed_and_is_balanced_by_folder():
    rooms = ["training", "chat"]
    assert mutants.sample(rooms, 11, 3) == mutants.sample(rooms, 11, 3) != mutants.sample(rooms, 11, 4)
    counts = [sum(mutants.room_of(one.path) == room for one in mutants.sample(rooms, 11, 3)) for room in rooms]
    assert counts == [5, 6]
    only = mutants.sample(["training"], 4, 0, only="transformer/training/tasks/_losses.py")
    assert {one.path for one in only} == {"transformer/training/tasks/_losses.py"}
    assert len(only) == 4


@pytest.fixture
def checkout(tmp_path):
    """A small project: one tested function, one that no test calls, and a test that never ends for one mutant."""
    for name, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
        "conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--ignore-slow-list', action='count')\n",
        "transformer/__init__.py": "",
        "transformer/nn/__init__.py": "from transformer.nn._a import double\n",
        "transformer/nn/_a.py": "def double(x):\n    return 2 * x\n\n\ndef unused(x):\n    return x + 1\n",
        "transformer/nn/_b.py": "y = 1\n",
        "tests/nn/test_a.py": "from transformer.nn import double\ndef test_a():\n    assert double(3) == 6\n",
        "tests/parts.py": "from transformer.nn import double\n",
        "tests/test_z.py": "import parts\ndef test_z():\n    pass\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_mutant_is_killed_by_a_test_and_the_file_is_restored(checkout):
    path = checkout / "transformer/nn/_a.py"
    text = path.read_text()
    results = {one.before: mutants.run(one, checkout, 5, 60.0) for one in mutants.mutants("transformer/nn/_a.py", text)}
    assert "test_a" in results["2 * x"]["killer"]
    assert results["x + 1"]["killer"] == ""
    assert path.read_text() == text


def test_imports_lead_through_packages_to_the_defining_file(checkout):
    target = checkout / "transformer/nn/_a.py"
    assert target in imports(checkout / "tests/nn/test_a.py", checkout)
    assert distances(checkout / "tests/test_z.py", checkout)[target] == 2
    assert nearest_tests(checkout, "transformer/nn/_a.py", 9) == ["tests/nn/test_a.py", "tests/test_z.py"]
    assert nearest_tests(checkout, "transformer/nn/_a.py", 1) == ["tests/nn/test_a.py"]
    assert nearest_tests(checkout, "transformer/nn/_b.py", 9) == []


def test_tests_that_share_rare_words_with_the_code_come_early(checkout):
    for name, word in {"one": "common", "other": "common", "rare": "rare_word", "rare_parity": "rare_word"}.items():
        text = f"import parts\ndef test_{name}():\n    assert parts.{word}\n"
        (checkout / f"tests/test_{name}.py").write_text(text)
    code = "def rare_word(common):\n    return common"
    assert nearest_tests(checkout, "transformer/nn/_a.py", 2, code) == ["tests/nn/test_a.py", "tests/test_rare.py"]
    assert len(nearest_tests(checkout, "transformer/nn/_a.py", 9, code)) == 5  # parity tests run elsewhere


def test_a_survivor_is_matched_after_its_code_moved(monkeypatch, tmp_path):
    (tmp_path / "file.py").write_text("a = 1\nb = 1\nc = 1\n\nb = 1\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    earlier = {"path": "file.py", "code": "b = 1", "before": "1", "after": "(2)"}
    assert [mutants.same_mutant(earlier | {"line": line}).line for line in (1, 4)] == [2, 5]
    assert mutants.same_mutant(earlier | {"line": 2, "code": "b = 1 + 1"}) is None
    assert mutants.same_mutant(earlier | {"line": 2, "before": "5"}) is None


def test_planted_faults_change_the_named_part_of_their_line(monkeypatch, tmp_path):
    (tmp_path / "file.py").write_text("é = f(a)\nif é:\n    b = g(é, a)\n\nb = 1\nb = 1\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    faults = [
        {"path": "file.py", "code": "b = g(é, a)", "before": ", a", "after": "", "tests": ["tests/test_a.py"]},
        {"path": "file.py", "code": "b = 1", "before": "1", "after": "2", "nth": 1, "tests": []},
    ]
    (tmp_path / "planted.json").write_text(json.dumps(faults))
    first, second = mutants.planted(tmp_path / "planted.json")
    assert first.apply((tmp_path / "file.py").read_text()).splitlines()[2] == "    b = g(é)"
    assert first.tests == ("tests/test_a.py",)
    assert second.apply((tmp_path / "file.py").read_text()).splitlines()[-2:] == ["b = 1", "b = 2"]
    del faults[1]["nth"]
    (tmp_path / "planted.json").write_text(json.dumps(faults))
    with pytest.raises(ValueError, match="not once in the code") as caught:
        mutants.planted(tmp_path / "planted.json")
    assert "b = 1" in str(caught.value)
    assert "g(é, a)" not in str(caught.value)


def test_the_list_of_planted_faults_names_files_and_tests():
    """Whether their lines are still in the code is reported by the program, so that they can be changed freely."""
    faults = json.loads((mutants.ROOT / "reliability" / "planted.json").read_text(encoding="utf-8"))
    assert len(faults) >= 100
    for fault in faults:
        assert fault["tests"]
        assert all((mutants.ROOT / name).is_file() for name in [fault["path"], *fault["tests"]]), fault["option"]
        assert fault["before"] in fault["code"]
        assert fault["before"] != fault["after"]


def test_tests_are_matched_to_the_innermost_function():
    text = "x = 1\ndef f():\n    def g():\n        return x\n    return g\n"
    assert [mutants.enclosing(text, line).strip().partition("\n")[0] for line in (1, 2, 4, 5)] == [
        "x = 1",
        "def f():",
        "def g():",
        "def f():",
    ]


@given(st.lists(st.tuples(st.sampled_from(["transformer/nn/_a.py", "transformer/chat/_b.py"]), st.integers(0, 2))))
def test_every_mutant_is_in_one_column_of_the_table(kinds):
    results = [
        {"path": path, "code": "a + 1", "before": "a", "after": "b", "killer": "test" if kind == 0 else ""}
        for path, kind in kinds
        if kind < 2 or "chat" in path
    ]
    counted = mutants.rows(results, {"transformer/chat/_b.py: a + 1: a -> b": "the same"})
    assert sum(row["mutants"] for row in counted.values()) == len(results)
    for room, row in counted.items():
        assert row["mutants"] == row["killed"] + row["same"] + row["survived"]
        assert row["same" if room == "nn" else "survived"] == 0


def test_the_table_has_a_row_per_folder_and_a_total():
    counted = {"nn": {"mutants": 10, "killed": 8, "same": 1, "survived": 1}}
    result = {"date": "2026-01-02", "machine": "m", "versions": {}, "count": 10, "seed": 0, "seconds": 60.0}
    text = mutants.table(result | {"rows": counted})
    assert "| nn | 10 | 8 (89 %) | 1 | 1 |" in text
    assert "| all | 10 | 8 (89 %) | 1 | 1 |" in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--count", "0"], "--count"),
        (["--only", "transformer/none.py"], "transformer/none.py"),
        (["--only", "transformer/nn/_masks.py", "--output", "docs/reliability.md"], "--output"),
    ],
)
def test_rejects_options_before_any_test(words, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        mutants.main(words)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_every_reason_belongs_to_a_mutant_of_the_code():
    for key, reason in json.loads((mutants.ROOT / mutants.REASONS).read_text()).items():
        path = key.partition(": ")[0]
        lines = (mutants.ROOT / path).read_text(encoding="utf-8").splitlines()
        same = [
            {"path": path, "code": lines[one.line - 1].strip(), "before": one.before, "after": one.after}
            for one in mutants.file_mutants(mutants.ROOT / path)
        ]
        assert any(mutants.reason(one, {key: reason}) for one in same), key
        assert reason
