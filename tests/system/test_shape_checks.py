"""The type checks of the tests: they reject wrong shapes, and build no checks when a function is called."""

import subprocess
import sys

import pytest
import shape_checks

MODULE = """
import jax
from jaxtyping import Array, Float


def double(x: Float[Array, "L D"]) -> Float[Array, "L D"]:
    def inner(y: Float[Array, "L D"]):
        return 2 * y

    double.inner = inner
    return inner(x)


class Doubler:
    def __call__(self, x: Float[Array, "L D"]) -> Float[Array, "D L"]:
        return 2 * x
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The output of a process that imports a checked module and calls its functions."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "module_of_shapes.py").write_text(MODULE)
    code = """
import shape_checks
shape_checks.install(["module_of_shapes"])
import jax, module_of_shapes as m, numpy as np
matrix, vector = jax.device_put(np.ones((2, 3), np.float32)), jax.device_put(np.ones(3, np.float32))
for function, argument in [(m.double, matrix), (m.double, vector), (m.Doubler(), matrix)]:
    try:
        print(function(argument).shape)
    except Exception as error:
        print(type(error).__name__)
print(hasattr(m.double, "__wrapped__"), hasattr(m.double.inner, "__wrapped__"))
"""
    paths = [str(folder), shape_checks.__file__.rpartition("/")[0]]
    code = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_wrong_shapes_are_rejected(checked):
    assert checked[:3] == ["(2, 3)", "TypeCheckError", "TypeCheckError"]


def test_functions_inside_functions_are_not_checked(checked):
    assert checked[3] == "True False"
