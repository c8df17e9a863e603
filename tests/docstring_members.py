"""The public names of a file of the package with their documentation, read without importing the file."""

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "transformer"


@dataclass(frozen=True)
class Member:
    """A public name of a file, with its documentation."""

    name: str
    node: ast.AST
    doc: str
    """the own or inherited docstring"""
    around: str = ""
    """the docstring of the enclosing class"""

    @property
    def words(self) -> str:
        """The docstrings that may document this name: its own and that of the class."""
        return f"{self.doc}\n{self.around}"


def written_after(body: list[ast.stmt], place: int) -> str:
    """Return the string after a statement, which is the docstring of a field or constant."""
    follower = body[place + 1] if place + 1 < len(body) else None
    is_string = isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant)
    return str(follower.value.value) if is_string else ""


@functools.cache
def package_classes() -> dict[str, ast.ClassDef]:
    """Return the top-level classes of all files by name, to resolve base classes."""
    trees = [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def is_public(name: str) -> bool:
    return not name.startswith("_")


def with_bases(cls: ast.ClassDef, classes: dict[str, ast.ClassDef], own: Callable) -> dict[str, str]:
    """Return `own(class)` of a class and of its bases. For each name, the first nonempty docstring counts."""
    found: dict[str, str] = {}
    for base in reversed([ast.unparse(base) for base in cls.bases]):
        if base in classes:
            found |= with_bases(classes[base], classes, own)
    return found | {name: doc for name, doc in own(cls).items() if doc or name not in found}


def methods(cls: ast.ClassDef) -> dict[str, str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name: ast.get_docstring(node) or "" for node in cls.body if isinstance(node, kinds)}


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
    """Return the public names of a file: the module, constants, functions, and classes with fields and methods."""
    tree, lines = ast.parse(source), ["", *source.splitlines()]
    classes = package_classes() | {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = [Member("module", tree, ast.get_docstring(tree) or "")]
    for place, node in enumerate(tree.body):
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            found += class_members(node, classes)
        elif isinstance(node, ast.FunctionDef) and is_public(node.name):
            found.append(Member(node.name, node, ast.get_docstring(node) or ""))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target).strip("()")
            name = next((one for one in name.split(", ") if is_public(one)), name)  # the first public name of several
            comment = "".join(line.partition("#")[2] for line in lines[node.lineno - 1 : node.end_lineno + 1])
            if is_public(name):
                found.append(Member(name, node, written_after(tree.body, place) or comment))
    return found
