"""Whoever asks help() of a public name is told: what it is, shapes by axis letters, units, errors, and the source.

Public is what has no leading underscore, in any file of transformer/. Nothing is imported, but where help() itself is
tested. A method without a docstring of its own has that of the base class, as help() shows it. Dunder
methods need none, but for `__call__` of a module; `setup` is Flax's. The class may speak for its methods and fields.
"""

import ast
import functools
import inspect
import pydoc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import transformer

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "transformer"

SAME_EVERYWHERE = {"dtype", "param_dtype"}  # fields of every module of Flax: of products, and of parameters
MODELS = {f"nn/models/{name}.py" for name in ("base", "causal_lm", "seq2seq", "encoders", "vision")}
KERNELS = {f"nn/kernels/{name}.py" for name in ("chunked", "reference", "ring", "splash")}

# Files whose functions take and return arrays of a layout.
NUMERIC = {
    *("nn/attention.py", "nn/blocks.py", "nn/layers.py", "nn/masks.py", "nn/mla.py", "nn/moe.py"),
    *("nn/partitioning.py", "nn/positions.py", "nn/stacks.py"),
    *("generate/decoding.py", "generate/layers.py", "generate/sampling.py"),
    *MODELS,
    *(
        "nn/kernels/chunked.py",
        "nn/kernels/contract.py",
        "nn/kernels/reference.py",
        "nn/kernels/ring.py",
        "nn/kernels/splash.py",
    ),
    *("training/losses.py", "training/state.py", "training/step.py"),
}
# Annotations that tell no axes: an array, or a tree of them, is behind them.
BARE = {"Array", "ndarray", "Any", "Leaf", "PyTree"}
JAXTYPING = {"Float", "Int", "Bool"}
# In the words: (B, T), (B or 1, N, t, s), (..., *in), (V,), (). Of a tree or a structured value, what it is.
PARENTHESES = re.compile(r"(?<![\w`])\(([^()]*)\)")
ENTRY = re.compile(r"(?:\*?\w+|\.\.\.)(?: or 1)?")
AXIS = re.compile(r"[A-Z][a-z]?|[a-z]|\*\w+|\.\.\.|\d+")
STRUCTURE = re.compile(r"\b(?:scalars?|trees?|pytree|caches?|param(?:eter)?s|state|aux|batch)\b|`[A-Z]\w+`")
ANY_SHAPE = re.compile(r"any (?:shape|rank)|same shape")

# Files that implement what others have published: each public class and function says who.
PUBLISHED = {
    *("nn/attention.py", "nn/blocks.py", "nn/layers.py", "nn/mla.py", "nn/moe.py", "nn/positions.py"),
    *MODELS,
    *(
        "generate/sampling.py",
        "nn/kernels/chunked.py",
        "nn/kernels/reference.py",
        "nn/kernels/ring.py",
        "nn/kernels/splash.py",
    ),
    *("training/losses.py", "training/optimizers.py"),
}
SOURCE = re.compile(r"et\s+al\.|arXiv|\b[Ss]ection \d|\b[A-Z]\w+(?: & [A-Z]\w+)? (?:19|20)\d\d\b")
# Names in those files that have no source, and why.
NO_SOURCE = {
    **dict.fromkeys(["LayerInputs", "LayerCache", "correct", "table_parameter"], "bookkeeping"),
    **dict.fromkeys(["as_matrix", "is_deterministic"], "as Flax has it"),
    **dict.fromkeys(["position_scheme", "make_norm", "kernel_init", "decay_mask"], "a choice by name"),
    **dict.fromkeys(["linear", "Linear"], "a matrix product"),
    **dict.fromkeys(["Choice", "choose"], "`Sampling`, compiled; that cites"),
    "Block": "what the blocks share; they cite",
    **dict.fromkeys(["angles", "count_parameters", "squared_error", "absolute_error"], "arithmetic of our own"),
}

# Quantities by a part of their name, and the unit that must be in the name or in the words.
UNITS = {
    r"loss": r"nats",
    r"seconds|elapsed|duration|_time\b": r"seconds?",
    r"frequencies|angles": r"[Rr]adians",
    r"bytes|memory": r"bytes|[KMG]iB",
}

Check = Callable[["Member"], str]  # what is missing in the words about a name; "" where nothing is


@dataclass(frozen=True)
class Member:
    """A public name of a file, and what is said about it."""

    name: str
    node: ast.AST
    doc: str
    """its own docstring, or the inherited one"""
    around: str = ""
    """the docstring of the class that it is in"""

    @property
    def words(self) -> str:
        """All that may speak for it: of a method that Python or Flax calls, the class as well."""
        return f"{self.doc}\n{self.around}"


def written_after(body: list[ast.stmt], place: int) -> str:
    """The string that stands after a statement: the docstring of a field or constant."""
    follower = body[place + 1] if place + 1 < len(body) else None
    is_string = isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant)
    return str(follower.value.value) if is_string else ""


@functools.cache
def package_classes() -> dict[str, ast.ClassDef]:
    """Classes at the top of any file, by name: what a class may inherit from."""
    trees = [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def is_public(name: str) -> bool:
    return not name.startswith("_")


def with_bases(cls: ast.ClassDef, classes: dict[str, ast.ClassDef], own: Callable) -> dict[str, str]:
    """`own(class)` of a class and of its bases; the nearest that says something counts."""
    found: dict[str, str] = {}
    for base in reversed([ast.unparse(base) for base in cls.bases]):
        if base in classes:
            found |= with_bases(classes[base], classes, own)
    return found | {name: doc for name, doc in own(cls).items() if doc or name not in found}


def methods(cls: ast.ClassDef) -> dict[str, str]:
    return {node.name: ast.get_docstring(node) or "" for node in cls.body if isinstance(node, ast.FunctionDef)}


def fields(cls: ast.ClassDef) -> dict[str, str]:
    found = [(place, node) for place, node in enumerate(cls.body) if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(node.target): written_after(cls.body, place) for place, node in found}


def class_members(cls: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[Member]:
    around = ast.get_docstring(cls) or ""
    yield Member(cls.name, cls, around)
    docs = with_bases(cls, classes, methods) | with_bases(cls, classes, fields)
    for node in cls.body:
        name = getattr(node, "name", ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else "_")
        if is_public(name) or name in ("__call__", "__init__", "__post_init__"):
            yield Member(f"{cls.name}.{name}", node, docs[name], around)


def members(source: str) -> list[Member]:
    """The public names of a file: the module itself, constants, functions, classes with their fields and methods."""
    tree, lines = ast.parse(source), ["", *source.splitlines()]
    classes = package_classes() | {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = [Member("module", tree, ast.get_docstring(tree) or "")]
    for place, node in enumerate(tree.body):
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            found += class_members(node, classes)
        elif isinstance(node, ast.FunctionDef) and is_public(node.name):
            found.append(Member(node.name, node, ast.get_docstring(node) or ""))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            comment = "".join(line.partition("#")[2] for line in lines[node.lineno - 1 : node.end_lineno + 1])
            if is_public(name):
                found.append(Member(name, node, written_after(tree.body, place) or comment))
    return found


def is_field(member: Member) -> bool:
    return isinstance(member.node, ast.AnnAssign) and "." in member.name


def missing_docstring(member: Member) -> str:
    """Everything but fields and constants has a docstring."""
    last = member.name.rpartition(".")[2]
    needless = isinstance(member.node, ast.Assign | ast.AnnAssign) or last in ("setup", "__init__", "__post_init__")
    return "" if needless or member.doc.strip() else "no docstring: say in one line what it is or does"


def missing_field(member: Member) -> str:
    """A field is told after it, or named by its class, or said by its type (`recipe: Recipe`)."""
    if not is_field(member) or member.doc:
        return ""
    name, annotation = member.name.rpartition(".")[2], ast.unparse(member.node.annotation)
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", annotation.removesuffix(" | None")).lower()
    said = name in SAME_EVERYWHERE or snake.endswith(name) or annotation.startswith("ClassVar")
    told = re.search(rf"\b{name.replace('_', '[_ ]')}\b", member.around)  # as a name, or in words
    return "" if said or told else "a field nobody tells: a docstring after it, or its name in that of the class"


def missing_constant(member: Member) -> str:
    """A constant is told after it or in a comment, unless its value says it: a string, Literal[...], Family(...)."""
    if not isinstance(member.node, ast.Assign | ast.AnnAssign) or is_field(member) or member.doc:
        return ""
    value = member.node.value
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return ""
    head = value.value if isinstance(value, ast.Subscript) else value.func if isinstance(value, ast.Call) else value
    plain = ast.unparse(head) in {"Literal", "TypeVar", "Family", *JAXTYPING}
    return "" if plain else "a constant nobody tells: a docstring after it, or a comment"


def bare(annotation: ast.AST | None) -> bool:
    """Whether arrays are behind an annotation that doesn't tell their axes. Functions aside."""
    if isinstance(annotation, ast.Name | ast.Attribute):
        return ast.unparse(annotation).rpartition(".")[2] in BARE
    if isinstance(annotation, ast.Subscript):
        head = ast.unparse(annotation.value)
        if head in JAXTYPING:
            return ast.unparse(annotation.slice).endswith("'...')")
        return head not in ("Callable", "type") and bare(annotation.slice)
    return annotation is not None and any(map(bare, ast.iter_child_nodes(annotation)))


def annotations(member: Member) -> dict[str, ast.AST | None]:
    """Of a field its own, of a function those of its arguments and, under its name, of what it returns."""
    name = member.name.rpartition(".")[2]
    if is_field(member):
        return {name: member.node.annotation}
    if not isinstance(member.node, ast.FunctionDef):
        return {}
    arguments = member.node.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg: argument.annotation for argument in given} | {name: member.node.returns}


def shapes(words: str) -> int:
    """How often a shape, or the structure of a tree, is told."""
    entries = [re.split(r",\s*", inner.strip().removesuffix(",")) for inner in PARENTHESES.findall(words)]
    told = [
        row == [""] or (all(ENTRY.fullmatch(e) for e in row) and any(AXIS.fullmatch(e.split(" ")[0]) for e in row))
        for row in entries
    ]
    return sum(told) + len(STRUCTURE.findall(words))


def missing_shapes(member: Member) -> str:
    """Where annotations don't tell the axes, as many shapes in words as there are such arguments and results."""
    unsaid = [name for name, annotation in annotations(member).items() if bare(annotation)]
    words = member.words if is_field(member) else member.doc
    if len(unsaid) <= shapes(words) or ANY_SHAPE.search(words):
        return ""
    return f"shapes are told neither by annotations nor in words: write (B, T) and the like for {', '.join(unsaid)}"


def errors(node: ast.AST) -> set[str]:
    """The classes of error that a function itself raises."""
    raised = [child.exc for child in ast.walk(node) if isinstance(child, ast.Raise) and child.exc]
    names = [ast.unparse(error.func if isinstance(error, ast.Call) else error) for error in raised]
    return {name for name in names if name[:1].isupper() and name not in ("AssertionError", "NotImplementedError")}


def missing_errors(member: Member) -> str:
    """What a function itself raises is named. `main` of a verb ends in an exit code instead."""
    if not isinstance(member.node, ast.FunctionDef) or member.name == "main":
        return ""
    silent = [error for error in sorted(errors(member.node)) if not re.search(rf"\b{error}\b", member.words)]
    return f"raises {', '.join(silent)} and doesn't say so: name it and say when" if silent else ""


def missing_source(member: Member) -> str:
    """A class or function at the top of a file says where its method is published."""
    if not isinstance(member.node, ast.ClassDef | ast.FunctionDef) or "." in member.name:
        return ""
    cites = bool(SOURCE.search(ast.unparse(member.node)))
    return "" if cites or member.name in NO_SOURCE else "no source: cite paper and section, or say why not in NO_SOURCE"


def missing_unit(member: Member) -> str:
    """Numbers in a unit: what a function returns or takes, and fields."""
    numbers = [
        name for name, annotation in annotations(member).items() if annotation and "float" in ast.unparse(annotation)
    ]
    return "; ".join(
        f"{name}: no unit ({unit})"
        for name in numbers
        for quantity, unit in UNITS.items()
        if re.search(quantity, name) and not re.search(unit, f"{name} {member.words}")
    )


def faults(path: str, source: str, check: Check) -> list[str]:
    """Each line names a place and what to write there."""
    found = [(member, check(member)) for member in members(source)]
    return [f"{path}:{getattr(member.node, 'lineno', 1)} {member.name}: {fault}" for member, fault in found if fault]


def faults_of_package(check: Check, files: set[str] | None = None) -> str:
    paths = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    assert set(files or ()) <= paths.keys(), f"no such file: {set(files or ()) - paths.keys()}"
    chosen = paths if files is None else files
    return "\n".join(line for path in chosen for line in faults(f"transformer/{path}", paths[path].read_text(), check))


CHECKS = {
    missing_docstring: None,
    missing_field: None,
    missing_constant: None,
    missing_shapes: NUMERIC,
    missing_errors: None,
    missing_source: PUBLISHED,
    missing_unit: None,
}
"""each check, and the files that it is for; None: all"""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nothing_is_missing_in_the_package(check):
    found = faults_of_package(check, CHECKS[check])
    assert not found, f"{check.__doc__}\n{found}"


def test_what_needs_no_source_is_there():
    """A name that went away, or cites by now, stands no longer on the list."""
    there = [member for path in PUBLISHED for member in members((PACKAGE / path).read_text())]
    uncited = {member.name for member in there if not SOURCE.search(member.doc)}
    assert uncited >= NO_SOURCE.keys(), NO_SOURCE.keys() - uncited


def test_the_legend_has_every_axis():
    """A letter in an annotation is one of axes.py; a small one is a part of its capital."""
    paragraph = members((PACKAGE / "nn" / "axes.py").read_text())[0].doc.split("\n\n")[1].partition(". ")[0]
    legend = set(re.findall(r"(?:^|,\s|\band\s)([A-Z][a-z]?)\s", paragraph))
    annotations = re.compile(rf"\b(?:{'|'.join(JAXTYPING)})\[[\w.]+, \"([^\"]*)\"\]")
    for path in sorted(PACKAGE.rglob("*.py")):
        for axes in annotations.findall(path.read_text()):
            used = {axis for axis in axes.split() if not axis.isdigit() and not axis.startswith(("*", "..."))}
            unknown = {axis for axis in used if axis not in legend and axis.upper() not in legend}
            assert not unknown, f"{path.relative_to(ROOT)}: {unknown} of {axes!r} is not in transformer/nn/axes.py"


@pytest.mark.parametrize("name", sorted({*transformer.__all__} - {"load"}))  # that one would import all of training
def test_help_of_what_the_package_offers(name):
    """Its own words, not the signature that dataclasses puts where there are none."""
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
    "array": (missing_shapes, f"def f(x: Array) -> Hidden:\n{F}"),
    "result": (missing_shapes, f"def f(x: Hidden) -> jax.Array:\n{F}"),
    "one of two": (missing_shapes, 'def f(x: Array, y: Any):\n  """x (B, T) and y."""'),
    "any axes": (missing_shapes, 'def f(x: Float[Array, \'...\']):\n  """Of x (which is it)."""'),
    "leaf": (missing_shapes, f'{A}x: Leaf | None\n  """of it"""'),
    "raise": (missing_errors, f"def f():\n{F}raise ConfigError('x')"),
    "other error": (missing_errors, 'def f():\n  """Does, or KeyError."""\n  raise ValueError'),
    "at birth": (missing_errors, f"{A}def __post_init__(self):\n    raise ValueError('x')"),
    "source": (missing_source, 'def f():\n  """A known norm, section of it."""'),
    "loss": (missing_unit, f"def f(*, eval_loss: float):\n{F}"),
    "time": (missing_unit, f"def step_time() -> float:\n{F}"),
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
    "alias": (missing_shapes, f"def f(x: Hidden, n: int) -> Float[Array, 'B T']:\n{F}"),
    "words": (missing_shapes, 'def f(x: Array, y: Any) -> Array:\n  """(B or 1, T), a tree -> (..., *out)."""'),
    "any shape": (missing_shapes, 'def f(x: Array, y: Array):\n  """Of any shape."""'),
    "functions": (missing_shapes, f"def f(x: Callable[..., Array]):\n{F}"),
    "raises": (missing_errors, 'def f():\n  """Raises ConfigError."""\n  raise ConfigError("x")'),
    "class raises": (missing_errors, f"{A.replace('An a', 'ValueError: no')}def __init__(self):\n    raise ValueError"),
    "again": (missing_errors, f"def f():\n{F}try: ...\n  except OSError as error: raise error"),
    "cites": (missing_source, 'def f():\n  """It (Ba et al. 2016)."""\nclass A:\n  """It (Glorot & Bengio 2010)."""'),
    "listed": (missing_source, f"def angles(): ...\n{A.replace('An a', 'It, arXiv 1')}def f(self): ..."),
    "unit beside": (missing_unit, f'{A}loss: float = 0.0\n  """nats a token"""'),
    "unit in the name": (missing_unit, f"def f(wait_seconds: float, glossy: str):\n{F}"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_missing_is_seen(case):
    check, source = BAD[case]
    (found,) = faults("a.py", f'"""A file."""\n\n{source}', check)
    assert re.fullmatch(r"a\.py:\d+ [\w.]+: .+", found)


@pytest.mark.parametrize("case", GOOD)
def test_what_is_right_passes(case):
    check, source = GOOD[case]
    assert faults("a.py", f'"""A file."""\n\n{source}', check) == []


def test_a_file_without_a_docstring_is_seen():
    assert [fault[:27] for fault in faults("a.py", "x = 1", missing_docstring)] == ["a.py:1 module: no docstring"]
