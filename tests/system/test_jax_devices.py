"""`-m gpu`: when it computes on a GPU, which tests it selects, and the variables of each run."""

import jax_devices
import pytest


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("gpu", True),
        ("slow or gpu", True),
        ("not slow and not gpu and not parity", False),
        ("not slow", False),
        ("", False),
        ("gpu_memory", False),
    ],
)
def test_an_expression_asks_for_a_gpu_if_it_selects_the_mark(expression, expected):
    assert jax_devices.asks_for_gpu(expression) is expected


@pytest.mark.parametrize("gpu", [True, False])
def test_variables_of_the_user_stay(gpu):
    given = {"JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--xla_dump_to=x"}
    environment = dict(given)
    jax_devices.prepare(gpu, environment)
    assert environment["JAX_PLATFORMS"] == "tpu"
    assert environment["XLA_FLAGS"].startswith("--xla_dump_to=x --xla")
    assert ("xla_force_host_platform_device_count=8" in environment["XLA_FLAGS"]) is not gpu
    assert ("XLA_PYTHON_CLIENT_PREALLOCATE" in environment) is gpu
    once = dict(environment)
    jax_devices.prepare(gpu, environment)  # as in the workers of pytest-xdist, which inherit the variables
    assert environment == once


SUITE = """
import pytest

def test_numbers(): pass

@pytest.mark.cpu_only("eight devices")
def test_mesh(): pass

@pytest.mark.slow
def test_long(): pass

@pytest.mark.cpu_only("a TPU", cases="^splash")
@pytest.mark.parametrize("kernel", ["splash", "cudnn"])
def test_kernel(kernel): pass
"""


@pytest.fixture
def suite(pytester):
    """A folder for tests with the marks of this suite."""
    pytester.makeconftest(
        "import jax_devices\ndef pytest_collection_modifyitems(items): jax_devices.mark_for_gpu(items)\n"
    )
    pytester.makeini("[pytest]\nmarkers =\n    gpu: g\n    slow: s\n    parity: p\n    cpu_only(reason, cases): c\n")
    return pytester


def test_selects_the_default_tests_of_the_rooms(suite):
    for folder in ("nn", "generate", "training/plan", "system"):
        file = suite.path / "tests" / folder / "test_some.py"
        file.parent.mkdir(parents=True)
        file.write_text(SUITE)
    result = suite.runpytest_inprocess("-m", "gpu", "-v", "--import-mode=importlib", "-p", "no:cacheprovider")
    passed = [line.split()[0] for line in result.outlines if " PASSED" in line]
    names = ["test_numbers", "test_kernel[cudnn]"]
    assert passed == [f"tests/{folder}/test_some.py::{name}" for folder in ("generate", "nn") for name in names]


@pytest.mark.parametrize("mark", ["cpu_only", "cpu_only(reason='x')", "cpu_only('x', case='y')"])
def test_rejects_a_mark_without_reason(suite, mark):
    suite.makepyfile(f"import pytest\n@pytest.mark.{mark}\ndef test_a(): pass\n")
    result = suite.runpytest_inprocess("-p", "no:cacheprovider")
    assert "expected @pytest.mark.cpu_only('reason') or cpu_only('reason', cases=...)" in result.stderr.str()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
