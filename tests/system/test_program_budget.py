"""The budget of XLA programs of each default test, and its error message."""

import jax
import numpy as np
import program_budget
import pytest

pytestmark = pytest.mark.programs(20, reason="the tests that it runs compile programs")


@pytest.fixture
def pytester_with_budget(pytester):
    """A folder for test files that have the budget of this suite."""
    pytester.makeconftest(
        "import jax, program_budget\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'programs: budget')\n"
        "    config.addinivalue_line('markers', 'slow: no budget')\n"
        "    config.pluginmanager.register(program_budget.ProgramBudget(fresh=True))\n"
    )
    return pytester


EAGER = """
import jax.numpy as jnp
import numpy as np
import pytest

def eager(count):
    x = np.ones((3, 5), np.float32)
    for operation in [jnp.sin, jnp.cos, jnp.tan, jnp.exp, jnp.log, jnp.tanh, jnp.sinh, jnp.cosh][:count]:
        operation(x)
"""


def run(pytester, text, name="test_a"):
    pytester.makepyfile(**{name: EAGER + text})
    return pytester.runpytest_inprocess("-p", "no:cacheprovider")


def test_reports_compilations_over_the_budget_with_their_location(pytester_with_budget):
    result = run(pytester_with_budget, "def test_a():\n    eager(7)\ndef test_b():\n    eager(6)\n")
    result.assert_outcomes(passed=1, failed=1)
    output = result.stdout.str()
    assert "7 XLA programs" in output
    assert "budget is 6" in output
    for name in ("sin", "cos", "tan", "exp", "log", "tanh", "sinh"):
        assert name in output


@pytest.mark.parametrize(
    ("mark", "outcomes"),
    [
        ("@pytest.mark.programs(8, reason='all functions')", {"passed": 1}),
        ("@pytest.mark.programs(7, reason='all functions')", {"failed": 1}),
        ("@pytest.mark.slow", {"passed": 1}),
    ],
)
def test_a_mark_changes_the_budget(pytester_with_budget, mark, outcomes):
    run(pytester_with_budget, f"{mark}\ndef test_a():\n    eager(8)\n").assert_outcomes(**outcomes)


@pytest.mark.parametrize("mark", ["programs(8)", "programs(reason='x')", "programs('8', reason='x')"])
def test_rejects_a_mark_without_number_or_reason(pytester_with_budget, mark):
    result = run(pytester_with_budget, f"@pytest.mark.{mark}\ndef test_a():\n    eager(1)\n")
    assert "expected @pytest.mark.programs(number, reason='...')" in result.stdout.str()
    assert result.ret != 0


@pytest.mark.parametrize(("scope", "outcomes"), [("module", {"passed": 1}), ("function", {"failed": 1})])
def test_programs_of_shared_fixtures_do_not_count(pytester_with_budget, scope, outcomes):
    text = f"@pytest.fixture(scope='{scope}')\ndef made():\n    eager(8)\ndef test_a(made):\n    eager(2)\n"
    run(pytester_with_budget, text).assert_outcomes(**outcomes)


def test_rejects_programs_compiled_by_an_import(pytester_with_budget):
    jax.clear_caches()
    result = run(pytester_with_budget, "eager(7)\ndef test_a():\n    pass\n", "test_of_an_import")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "7 XLA programs" in result.stderr.str() + result.stdout.str()


def test_a_failure_of_the_test_itself_is_reported_instead(pytester_with_budget):
    result = run(pytester_with_budget, "def test_a():\n    eager(8)\n    assert 1 == 2\n")
    assert "assert 1 == 2" in result.stdout.str()
    assert "XLA programs" not in result.stdout.str()


def test_a_jitted_function_is_one_program():
    budget = program_budget.ProgramBudget(fresh=False)
    x = np.ones((3, 11), np.float32)
    jax.jit(lambda x: (x + 1) * x.sum())(x)
    assert len(budget.compiled) == 1
    name, place = budget.compiled[0]
    assert "lambda" in name
    assert place.startswith("tests/system/test_program_budget.py:")
