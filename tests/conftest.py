"""Strict settings for all tests: eight simulated devices, shape checks, no rank promotion, our warnings are errors."""

import ctypes
import gc
import importlib.metadata
import os
import pathlib
import random
import time

import compiled_programs

# Set before JAX starts: eight simulated CPU devices, and few threads, because the machine may be shared.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
compiled_programs.use()
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Compilation takes most of the time of the tests. Optimization level 0 halves it, and the older emitters, with one
    # module per program, save another third. Later releases don't have them, and reject unknown flags.
    flags = " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    release = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    if release == (0, 10):
        flags += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if release >= (0, 10):
        # Eight devices share few cores: on a busy machine one may join a collective operation after the default of 40
        # seconds, at which XLA ends the process.
        flags += " --xla_cpu_collective_call_terminate_timeout_seconds=300"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags

import jaxtyping  # noqa: E402
import shape_checks  # noqa: E402

# Modules whose annotations are checked, for array shapes. Modules that validate user input are left out, because their
# error messages are tested.
NUMERICS = [
    f"nn.{name}"
    for name in [
        "_attention",
        "_blocks",
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

import jax  # noqa: E402
import program_budget  # noqa: E402
import pytest  # noqa: E402
from shared_folders import kept_in  # noqa: E402

from reliability.slow_tests import listed_tests  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
BEGAN = time.monotonic()
MOST_MEMORY = 3 * 2**30
"""bytes of a worker after which slow tests free what they compiled"""
DURATIONS: dict[str, float] = {}
"""seconds of each default test that has passed"""


def pytest_addoption(parser):
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
    if not config.getoption("any_programs"):
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
