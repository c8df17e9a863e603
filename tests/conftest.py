"""Strict settings for all tests: eight simulated devices, shape checks, no rank promotion, our warnings are errors.

With `-m gpu`, the tests of numbers compute on a GPU instead (`jax_devices`).
"""

import ctypes
import gc
import os
import pathlib
import random
import time

import compiled_programs
import jax_devices
import jaxtyping
import pytest
import shape_checks
from shared_folders import kept_in

from reliability.slow_tests import listed_tests

# JAX is imported in functions only, because `pytest_addoption` chooses its devices.
compiled_programs.use()

# Modules whose annotations are checked, for array shapes. Modules that validate user input are left out, because their
# error messages are tested.
NUMERICS = [
    f"nn.{name}"
    for name in [
        "_attention",
        "_blocks",
        "_few_rows",
        "kernels",
        "layers",
        "_masks",
        "_mla",
        "models",
        "_moe",
        "_partitioning",
        "_positions",
        "quantization",
        "_stacks",
    ]
]
NUMERICS += ["generate", "training.tasks._losses", "training._optimizers", "training._state", "training._step"]
NUMERICS += [f"viz.{path.stem}" for path in pathlib.Path(__file__).parents[1].glob("transformer/viz/*.py")]
shape_checks.install([f"transformer.{name}" for name in NUMERICS])

BEGAN = time.monotonic()
MOST_MEMORY = 3 * 2**30
"""bytes of a worker after which slow tests free what they compiled"""
DURATIONS: dict[str, float] = {}
"""seconds of each default test that has passed"""


def pytest_addoption(parser, pluginmanager):
    # pytest calls this before it imports any other file of the tests, which may import JAX.
    gpu = jax_devices.asks_for_gpu(pluginmanager.get_plugin("pytestconfig").known_args_namespace.markexpr)
    jax_devices.prepare(gpu)
    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")
    if gpu:
        jax_devices.use_exact_products()
    parser.addoption(
        "--minutes", type=float, help="skip tests that would start later than this many minutes after the start"
    )
    parser.addoption(
        "--fresh-programs",
        action="store_true",
        help="clear JAX's caches before each test, so that its number of programs does not depend on earlier tests",
    )
    parser.addoption(
        "--ignore-slow-list", action="store_true", help="treat the tests in slow_tests.txt as default tests"
    )
    parser.addoption("--any-programs", action="store_true", help="do not limit the number of programs of a test")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in the random order of this seed")


def pytest_configure(config):
    if jax_devices.asks_for_gpu(config.getoption("markexpr")):
        jax_devices.check_gpu()
    elif not config.getoption("any_programs"):
        import program_budget  # imports JAX

        config.pluginmanager.register(program_budget.ProgramBudget(config.getoption("fresh_programs")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip tests after --minutes: on a slow machine, skipped tests are better than a run that is killed."""
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"not started within --minutes {minutes:g}")


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed and "slow" not in report.keywords:
        DURATIONS[report.nodeid] = round(report.duration, 2)


def pytest_sessionfinish(session):
    """Record the duration of each test, for `make flaky`. With several workers, only the first process does."""
    if not hasattr(session.config, "workerinput") and hasattr(session.config, "cache"):
        before = session.config.cache.get("transformer/durations", {})
        session.config.cache.set("transformer/durations", before | DURATIONS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark as slow: tests in slow_tests.txt, and cases beyond the number in `default_cases`.

    The default cases are spaced evenly over the list of cases.
    """
    cases = {}
    for item in items:
        if item.get_closest_marker("default_cases") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        (count,) = group[0].get_closest_marker("default_cases").args
        count = min(count, len(group))
        by_default = {group[place * len(group) // count].nodeid for place in range(count)}
        for item in group:
            if item.nodeid not in by_default:
                item.add_marker(pytest.mark.slow)
    if not config.getoption("ignore_slow_list"):
        listed = set(listed_tests())
        for item in items:
            if listed & {item.nodeid, item.nodeid.partition("[")[0]}:
                item.add_marker(pytest.mark.slow)
    if jax_devices.asks_for_gpu(config.getoption("markexpr")):
        jax_devices.mark_for_gpu(items)
    if config.getoption("shuffle") is not None:
        random.Random(config.getoption("shuffle")).shuffle(items)


def pytest_collection_finish():
    """Collect garbage rarely and never among imported objects, because tracing creates many long-lived objects."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Free the compiled programs and the garbage of slow tests, before a worker takes the memory of the others.

    glibc keeps freed memory (3.0 of 3.5 GB after the tests of generation); `malloc_trim` returns it to the system.
    Default tests are left out: they compile few programs, and the next test would compile those of its file again.
    """
    if item.get_closest_marker("slow") and resident_bytes() > MOST_MEMORY:
        import jax

        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # other C libraries have no such function
            trim(0)


def resident_bytes() -> int:
    """Return the memory that this process uses; 0 where the system does not tell."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session", autouse=True)
def shared_folders(tmp_path_factory):
    """A folder that all workers share: models that several test files use are written once."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root /= "shared"
    root.mkdir(exist_ok=True)
    with kept_in(root):
        yield


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """The folder with real data in TRANSFORMER_TEST_DATA. Without it, the tests that need it are skipped."""
    folder = os.environ.get("TRANSFORMER_TEST_DATA")
    if not folder:
        pytest.skip("TRANSFORMER_TEST_DATA is not set to a folder with real data (see CONTRIBUTING.md, 'Tests')")
    return pathlib.Path(folder)


@pytest.fixture
def without_type_checks():
    """Disable the type checks, whose errors would come before the error messages that users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def tpu_compiler():
    """The package with the TPU compiler. Without it, the tests that need it are skipped."""
    return pytest.importorskip("libtpu", reason='no TPU compiler: pip install "libtpu>=0.0.51"')


@pytest.fixture(scope="session")
def torch():
    """PyTorch. It is imported late, so that the tests can be collected if it is not installed."""
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def transformers(torch):
    """Hugging Face transformers, also imported late."""
    return pytest.importorskip("transformers")
