"""The type checks of the tests: they reject wrong shapes, and build no checks when a function is called."""

import subprocess
import sys

import pytest
import shape_checks

MODULE = """
from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float


def double(x: Float[Array, "L D"]) -> Float[Array, "L D"]:
    def inner(y: Float[Array, "L D"]):
        return 2 * y

    double.inner = inner
    return inner(x)


class Doubler:
    def __call__(self, x: Float[Array, "L D"]) -> Float[Array, "D L"]:
        return 2 * x


@dataclasses.dataclass
class Pair:
    x: Float[Array, "L D"]
    y: Float[Array, "D"]

    @staticmethod
    def of(count: int) -> str:
        return count

    @property
    def width(self) -> str:
        return self.x.shape[1]


def plain(x):
    return x
"""
# Each call, and the shape that it returns or its error.
CALLS = {
    "m.double(matrix)": "(2, 3)",
    "m.double(vector)": "TypeCheckError",
    "m.Doubler()(matrix)": "TypeCheckError",  # the result has the shape of the argument, not its transpose
    "m.Pair(matrix, vector).x": "(2, 3)",
    "m.Pair(matrix, matrix[0, :2])": "TypeCheckError",  # D is 3 and 2
    "m.Pair(y=vector, x=matrix).width": "TypeCheckError",  # functions without shapes are checked, too
    "m.Pair.of('1')": "TypeCheckError",
    "m.Pair.of(1)": "TypeCheckError",
    "m.plain(matrix)": "(2, 3)",
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The output of a process that imports a checked module and calls its functions."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "module_of_shapes.py").write_text(MODULE)
    code = """
import shape_checks
shape_checks.install(["module_of_shapes"])
import jax, jaxtyping, module_of_shapes as m, numpy as np
matrix, vector = jax.device_put(np.ones((2, 3), np.float32)), jax.device_put(np.ones(3, np.float32))
for call in CALLS:
    try:
        print(eval(call).shape)
    except Exception as error:
        print(type(error).__name__)
print(*(hasattr(function, "__wrapped__") for function in (m.double, m.double.inner, m.plain)))
jaxtyping.config.update("jaxtyping_disable", True)
print(m.Pair.of(5), m.Doubler()(matrix).shape)
"""
    paths = [str(folder), shape_checks.__file__.rpartition("/")[0]]
    code = f"import sys; sys.path[:0] = {paths!r}\nCALLS = {list(CALLS)}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_wrong_shapes_and_types_are_rejected(checked):
    assert dict(zip(CALLS, checked, strict=False)) == CALLS


def test_functions_without_annotations_and_inside_functions_are_not_checked(checked):
    assert checked[len(CALLS)] == "True False False"


def test_the_checks_can_be_disabled(checked):
    assert checked[len(CALLS) + 1] == "5 (2, 3)"
