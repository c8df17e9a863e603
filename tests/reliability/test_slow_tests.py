"""The choice of slow tests: the default tests still execute everything, and the list names tests that exist."""

import ast
import random
from pathlib import Path

import pytest

from reliability import slow_tests
from reliability.slow_tests import Arc, choose, choose_elsewhere, table, written

ROOT = Path(__file__).resolve().parents[2]


def drawn(seed):
    """Return the arcs and seconds of drawn tests: three cases of each of 20 functions."""
    draw = random.Random(seed)
    tests = [f"tests/test_a.py::test_{number}[{case}]" for number in range(20) for case in "xyz"]
    arcs = {Arc("nn/_a.py", line, line + 1): frozenset(draw.sample(tests, draw.randint(1, 9))) for line in range(40)}
    return arcs, {test: draw.choice([0.1, 0.3, 0.5, 2.0]) for test in tests}


@pytest.mark.parametrize("seed", range(5))
def test_the_other_tests_execute_every_arc(seed):
    arcs, seconds = drawn(seed)
    listed = set(choose(arcs, seconds))
    assert listed
    assert all(tests - listed for tests in arcs.values())


@pytest.mark.parametrize("seed", range(5))
def test_fast_tests_and_one_case_per_function_stay_in_the_default_run(seed):
    arcs, seconds = drawn(seed)
    listed = choose(arcs, seconds, least=0.25, most=0.7)
    assert all(seconds[test] >= 0.25 for test in listed)
    left = {test.partition("[")[0] for test in seconds.keys() - set(listed)}
    whole = {test.partition("[")[0] for test in seconds} - left
    assert all(max(seconds[f"{name}[{case}]"] for case in "xyz") > 0.7 for name in whole)


def test_a_test_without_package_code_stays_in_the_default_run():
    """Such a test checks the source or another process, so no other test is known to do the same."""
    arcs = {Arc("nn/_a.py", 1, 2): frozenset({"a", "b"})}
    assert choose(arcs, {"a": 3.0, "b": 2.0, "c": 9.0}) == ["a"]


def test_files_that_detect_planted_faults_keep_their_tests():
    """`t::b` is listed already, so it executes nothing by default, and `u::c` must execute the arc."""
    arcs = {
        Arc("nn/_a.py", 1, 2): frozenset({"t::a", "t::b", "u::c", "u::d"}),
        Arc("nn/_a.py", 2, 3): frozenset({"t::b", "u::c"}),
    }
    seconds = {"t::a": 9.0, "t::b": 9.0, "u::c": 2.0, "u::d": 1.0}
    assert choose_elsewhere(arcs, seconds, {"t::b", "u::d"}, {"t"}) == (["u::d"], {"t::b"})
    assert choose_elsewhere(arcs, seconds, {"u::d"}, {"t"}) == (["u::c", "u::d"], set())


def test_expensive_tests_are_removed_first():
    arcs = {Arc("nn/_a.py", line, line + 1): frozenset({"a", "b"}) for line in range(3)}
    assert choose(arcs, {"a": 3.0, "b": 4.0}) == ["b"]


def test_a_function_name_covers_all_its_cases():
    seconds = {"t::a[x]": 1.0, "t::a[y]": 1.0, "t::b[x]": 1.0, "t::b[y]": 1.0}
    text = written(["t::a[x]", "t::a[y]", "t::b[x]"], seconds, {"t::b[z]", "t::a[w]"})
    assert [line for line in text.splitlines() if not line.startswith("#")] == ["t::a", "t::b[x]", "t::b[z]"]


def test_measured_tests_are_read_and_counted_by_folder(tmp_path):
    pytest.importorskip("coverage")
    import coverage

    data = coverage.CoverageData(str(tmp_path / "data"))
    for test, arcs in {"t::a": {(1, 2), (2, -1)}, "t::b": {(1, 2), (2, 3)}}.items():
        data.set_context(test)
        data.add_arcs({"/copy/transformer/nn/_a.py": arcs, "/copy/other/_b.py": {(1, 2)}})
    data.write()
    (tmp_path / "seconds.gw0").write_text('["t::a", 1.5, 0]\n["t::b", 0.5, 0.0]\n["t::process", 0.5, 2.0]\n')
    found = slow_tests.arcs_of(tmp_path)
    assert found[Arc("nn/_a.py", 1, 2)] == {"t::a", "t::b"}
    assert found.keys() == {Arc("nn/_a.py", 1, 2), Arc("nn/_a.py", 2, -1), Arc("nn/_a.py", 2, 3)}
    assert slow_tests.seconds_of(tmp_path) == {"t::a": 1.5, "t::b": 0.5}


def test_the_table_has_the_share_of_lines_and_branches_of_each_folder(tmp_path):
    pytest.importorskip("coverage")
    import coverage

    package = tmp_path / "transformer"
    (package / "nn").mkdir(parents=True)
    (package / "nn" / "_a.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    (package / "compat.py").write_text("x = 1\n")
    data = coverage.CoverageData(str(tmp_path / "data"))
    seen = {(-1, 1), (1, -1), (-1, 2), (2, 3), (3, -1)}  # f(True) alone
    data.add_arcs({str(package / "nn" / "_a.py"): seen, str(package / "compat.py"): {(-1, 1), (1, -1)}})
    data.write()
    rows = table([tmp_path]).splitlines()
    assert "| nn | 75.00 % | 50.00 % |" in rows
    assert rows[-1] == "| all | 80.00 % | 50.00 % |"
    assert "| top level | 100.00 % | 100.00 % |" in rows


def test_a_folder_without_a_measurement_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        slow_tests.main(["choose", str(tmp_path)])
    assert str(tmp_path) in capsys.readouterr().err


def test_every_listed_test_exists():
    names = slow_tests.listed_tests()
    assert names == sorted(set(names))
    functions = {}
    for name in names:
        path, *parts = name.partition("[")[0].split("::")
        if path not in functions:
            tree = ast.parse((ROOT / path).read_text())
            functions[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert functions[path] >= set(parts), name
