"""The public names of a file of the package, and what is said about each, read without importing it."""

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "transformer"


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
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target).strip("()")
            name = next((one for one in name.split(", ") if is_public(one)), name)  # of several, the first public one
            comment = "".join(line.partition("#")[2] for line in lines[node.lineno - 1 : node.end_lineno + 1])
            if is_public(name):
                found.append(Member(name, node, written_after(tree.body, place) or comment))
    return found
