"""Every public name has a docstring that documents its fields and errors; axis letters come from one legend.

Public names are those that a package exports. The files are parsed and not imported, except to test help(). A method
without a docstring inherits that of the base class, as in help(). Dunder methods need none, except `__call__` of a
module; `setup` belongs to Flax. The docstring of a class can document its methods and fields.
"""

import ast
import functools
import inspect
import pydoc
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from docstring_members import PACKAGE, Member, members
from package_exports import exporters

import transformer

ROOT = Path(__file__).resolve().parents[2]

SAME_EVERYWHERE = {"dtype", "param_dtype"}  # fields of every Flax module: dtypes of computation and of parameters

JAXTYPING = {"Float", "Int", "Bool"}

Check = Callable[["Member"], str]  # returns what is missing in the documentation of a name, or ""


def is_field(member: Member) -> bool:
    return isinstance(member.node, ast.AnnAssign) and "." in member.name


def missing_docstring(member: Member) -> str:
    """Everything but fields and constants has a docstring."""
    last = member.name.rpartition(".")[2]
    needless = isinstance(member.node, ast.Assign | ast.AnnAssign) or last in ("setup", "__init__", "__post_init__")
    return "" if needless or member.doc.strip() else "no docstring: add at least one line"


def missing_field(member: Member) -> str:
    """A field has a docstring after it, is mentioned by its class, or has a descriptive type (`recipe: Recipe`)."""
    if not is_field(member) or member.doc:
        return ""
    name, annotation = member.name.rpartition(".")[2], ast.unparse(member.node.annotation)
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", annotation.removesuffix(" | None")).lower()
    typed = name in SAME_EVERYWHERE or snake.endswith(name) or annotation.startswith("ClassVar")
    mentioned = re.search(rf"\b{name.replace('_', '[_ ]')}\b", member.around)  # as an identifier, or as words
    return "" if typed or mentioned else "undocumented field: add a docstring after it, or mention it in the class"


def missing_constant(member: Member) -> str:
    """A constant has a docstring after it or a comment, unless its value is a string, Literal[...] or Family(...)."""
    if not isinstance(member.node, ast.Assign | ast.AnnAssign) or is_field(member) or member.doc:
        return ""
    value = member.node.value
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return ""
    head = value.value if isinstance(value, ast.Subscript) else value.func if isinstance(value, ast.Call) else value
    plain = ast.unparse(head) in {"Literal", "TypeVar", "Family", *JAXTYPING}
    return "" if plain else "undocumented constant: add a docstring after it, or a comment"


def errors(node: ast.AST) -> set[str]:
    """Return the classes of errors that a function itself raises."""
    raised = [child.exc for child in ast.walk(node) if isinstance(child, ast.Raise) and child.exc]
    names = [ast.unparse(error.func if isinstance(error, ast.Call) else error) for error in raised]
    return {name for name in names if name[:1].isupper() and name not in ("AssertionError", "NotImplementedError")}


def missing_errors(member: Member) -> str:
    """The errors that a function itself raises are documented. `main` of a command returns an exit code instead."""
    if not isinstance(member.node, ast.FunctionDef) or member.name == "main":
        return ""
    silent = [error for error in sorted(errors(member.node)) if not re.search(rf"\b{error}\b", member.words)]
    return f"raises {', '.join(silent)} without documentation: add it to Raises:" if silent else ""


def public(path: Path) -> set[str]:
    """Return the public names of a file, and "module" for the file itself."""
    return {"module", *exporters(path)}


def faults(path: str, source: str, check: Check) -> list[str]:
    """Return one line per missing piece of documentation, with its location."""
    return faults_of(path, members(source), check)


def faults_of(path: str, chosen: list[Member], check: Check) -> list[str]:
    found = [(member, check(member)) for member in chosen]
    return [f"{path}:{getattr(member.node, 'lineno', 1)} {member.name}: {fault}" for member, fault in found if fault]


CHECKS = (missing_docstring, missing_field, missing_constant, missing_errors)


@functools.cache
def faults_of_package() -> dict[Check, list[str]]:
    """Return the faults of the public names of all files by check, each file parsed once."""
    found: dict[Check, list[str]] = {check: [] for check in CHECKS}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = public(path)
        chosen = [one for one in members(path.read_text()) if one.name.partition(".")[0] in names]
        for check in CHECKS:
            found[check] += faults_of(str(path.relative_to(ROOT)), chosen, check)
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_docstring_of_the_package_is_complete(check):
    found = faults_of_package()[check]
    assert not found, "\n".join([check.__doc__, *found])


def test_the_legend_has_every_axis():
    """Each axis letter in an annotation is in the legend of _axes.py; a lower-case letter is a part of its capital."""
    paragraph = members((PACKAGE / "nn" / "_axes.py").read_text())[0].doc.split("\n\n")[1].partition(". ")[0]
    legend = set(re.findall(r"(?:^|,\s|\band\s)([A-Z][a-z]?)\s", paragraph))
    annotations = re.compile(rf"\b(?:{'|'.join(JAXTYPING)})\[[\w.]+, \"([^\"]*)\"\]")
    for path in sorted(PACKAGE.rglob("*.py")):
        for axes in annotations.findall(path.read_text()):
            used = {axis for axis in axes.split() if not axis.isdigit() and not axis.startswith(("*", "..."))}
            unknown = {axis for axis in used if axis not in legend and axis.upper() not in legend}
            assert not unknown, f"{path.relative_to(ROOT)}: {unknown} of {axes!r} is not in transformer/nn/_axes.py"


@pytest.mark.parametrize("name", sorted({*transformer.__all__} - {"load"}))  # importing it would import all of training
def test_public_names_have_help(name):
    """Each has its own docstring instead of the signature that dataclasses generate."""
    offered = getattr(transformer, name)
    doc = inspect.getdoc(offered) or ""
    assert len(doc.split()) > 3
    assert not doc.startswith(f"{name}(")
    assert doc.splitlines()[0] in pydoc.plain(pydoc.render_doc(offered))


A = 'class A:\n  """An a."""\n  '
F = '  """It does."""\n  '
BAD = {
    "function": (missing_docstring, "def f(): ..."),
    "class": (missing_docstring, "class A: ..."),
    "method": (missing_docstring, f"{A}def f(self): ..."),
    "property": (missing_docstring, f"{A}@property\n  def f(self): ..."),
    "call": (missing_docstring, f"{A}def __call__(self, x): ..."),
    "base without": (missing_docstring, f"class _B:\n  def f(self): ...\n{A.replace('A', 'A(_B)')}def f(self): ..."),
    "field": (missing_field, f"{A}size: int = 3"),
    "part of a word": (missing_field, f"{A.replace('An a', 'Of sizes')}size: int = 3"),
    "constant": (missing_constant, "SIZE = 3"),
    "raise": (missing_errors, f"def f():\n{F}raise ConfigError('x')"),
    "other error": (missing_errors, 'def f():\n  """Does, or KeyError."""\n  raise ValueError'),
    "at birth": (missing_errors, f"{A}def __post_init__(self):\n    raise ValueError('x')"),
}
GOOD = {
    "private": (missing_docstring, "def _f(): ...\nclass _A:\n  def f(self): ..."),
    "inherited": (
        missing_docstring,
        f'class _B:\n  def f(self):\n    """It."""\n{A.replace("A", "A(_B)")}def f(self): ...',
    ),
    "needless": (missing_docstring, f"{A}def setup(self): ...\n  def __eq__(self, other): ..."),
    "field after": (missing_field, f'{A}size: int = 3\n  """of it"""'),
    "field named": (missing_field, f"{A.replace('An a', 'Has a size, a word')}size: int = 3\n  a_word: str = ''"),
    "field inherited": (
        missing_field,
        f'class _B:\n  size: int\n  """of it"""\n{A.replace("A", "A(_B)")}size: int = 3',
    ),
    "field typed": (missing_field, f"{A}config: TransformerConfig\n  recipe: Recipe | None = None"),
    "constant after": (missing_constant, 'SIZE = 3\n"""of it"""'),
    "constant comment": (missing_constant, "SIZE = 3  # of it\n\n# of both\nA, B = 3, 5"),
    "constant plain": (missing_constant, 'FILE = "a.json"\nKind = Literal["a", "b"]\n_X = 3'),
    "raises": (missing_errors, 'def f():\n  """Raises ConfigError."""\n  raise ConfigError("x")'),
    "class raises": (missing_errors, f"{A.replace('An a', 'ValueError: no')}def __init__(self):\n    raise ValueError"),
    "again": (missing_errors, f"def f():\n{F}try: ...\n  except OSError as error: raise error"),
}


@pytest.mark.parametrize("case", BAD)
def test_incomplete_docstrings_are_detected(case):
    check, source = BAD[case]
    (found,) = faults("a.py", f'"""A file."""\n\n{source}', check)
    assert re.fullmatch(r"a\.py:\d+ [\w.]+: .+", found)


@pytest.mark.parametrize("case", GOOD)
def test_complete_docstrings_pass(case):
    check, source = GOOD[case]
    assert faults("a.py", f'"""A file."""\n\n{source}', check) == []


def test_a_file_without_a_docstring_is_detected():
    assert [fault[:27] for fault in faults("a.py", "x = 1", missing_docstring)] == ["a.py:1 module: no docstring"]
