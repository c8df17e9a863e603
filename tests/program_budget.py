"""Count the XLA programs that each test compiles, and fail a default test that compiles more than its budget.

Compilation takes most of the time of the tests, and most programs are single operations outside of `jax.jit`: expected
values computed with `jnp` instead of NumPy, or parameters of a module that is initialized without `jax.jit`. A number
of programs, unlike a time, does not depend on the machine.

A program read from the compilation cache counts as well. Programs of fixtures with a wider scope than one test do not
count, because no test causes them alone. JAX keeps programs in memory, so a test that runs after others can compile
fewer programs, never more; `--fresh-programs` clears this memory before each test.
"""

import sys

import jax
import pytest

LIMIT = 6
"""number of programs that a default test may compile without `@pytest.mark.programs`"""
EVENT = "/jax/core/compile/backend_compile_duration"
"""JAX reports it once for each program that is compiled or read from the compilation cache"""
NO_PLACES = "/program_budget.py", "/shape_checks.py"
"""files whose functions surround every call, so that they are not the place of a program"""
OTHER_BUDGETS = "slow", "gpu", "parity"
"""marks of tests without a budget"""


class ProgramBudget:
    """The pytest plugin. `compiled` contains the name and the place of each program of the current test."""

    def __init__(self, fresh: bool):
        self.fresh = fresh
        self.compiled: list[tuple[str, str]] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **details):
        if event == EVENT:
            self.compiled.append((str(details.get("fun_name", "a program")), _place()))

    def pytest_collection_finish(self):
        """Reject more than a few programs during the import of the test files, which every worker repeats.

        Raises:
            pytest.UsageError: lists the programs and their places.
        """
        if message := over_budget(self.compiled, LIMIT):
            raise pytest.UsageError(message.replace("The test", "The import of the test files", 1))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before = len(self.compiled)
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                del self.compiled[before:]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        if self.fresh:
            jax.clear_caches()
        self.compiled.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        result = yield
        message = over_budget(self.compiled, budget(item))
        if message:
            pytest.fail(message, pytrace=False)
        return result


def budget(item: pytest.Item) -> int | None:
    """Return the number of programs that a test may compile; None if it has no budget.

    Raises:
        pytest.UsageError: the mark of the test has no number or no reason.
    """
    if any(item.get_closest_marker(name) for name in OTHER_BUDGETS):
        return None
    mark = item.get_closest_marker("programs")
    if mark is None:
        return LIMIT
    if len(mark.args) != 1 or not isinstance(mark.args[0], int) or not mark.kwargs.get("reason"):
        raise pytest.UsageError(f"{item.nodeid}: expected @pytest.mark.programs(number, reason='...')")
    return mark.args[0]


def over_budget(compiled: list[tuple[str, str]], limit: int | None) -> str:
    """Return an error message that lists the programs by place, or an empty string if there are at most `limit`."""
    if limit is None or len(compiled) <= limit:
        return ""
    places: dict[str, list[str]] = {}
    for name, place in compiled:
        places.setdefault(place, []).append(name.removeprefix("jit_").removeprefix("jit(").removesuffix(")"))
    lines = [f"  {place}: {', '.join(names)}" for place, names in places.items()]
    return "\n".join(
        [
            f"The test compiled {len(compiled)} XLA programs; its budget is {limit}:",
            *lines,
            "Compute expected values with NumPy, make parameters with `numeric_parts.random_params`, and call modules",
            "in jax.jit. If it needs this many programs: @pytest.mark.programs(number, reason='...').",
        ]
    )


def _place() -> str:
    """Return the innermost line of the tests, or else of the package, that the current thread executes."""
    package = ""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        for folder in ("/tests/", "/transformer/", "/benchmarks/", "/examples/"):
            if folder in path and "site-packages" not in path and not path.endswith(NO_PLACES):
                place = f"{folder[1:]}{path.rpartition(folder)[2]}:{frame.f_lineno}"
                if folder == "/tests/":
                    return place
                package = package or place
        frame = frame.f_back
    return package or "another thread"
