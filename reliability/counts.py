"""Count what makes the package easy or hard to read, in this checkout or in several.

Usage: python -m reliability.counts                    (this checkout)
       python -m reliability.counts BEFORE .           (a table with a column for each checkout)

Only source files are read; nothing is imported from the checkouts, so a checkout of any commit can be counted:
`git worktree add ../before COMMIT`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOMS_TO_COMPARE = ("training", "inference", "serve")
"""rooms whose files have similar purposes, so that equal names would confuse"""
MODELS = (
    "CausalLM|MaskedLM|Seq2Seq|Classifier|Embedder|DualEncoder|VisionClassifier|VisionEncoder|VisionLanguageModel"
    "|Forecaster|SpeechToText|SpeechEncoder|CTC|SeriesClassifier|SeriesRegressor|SeriesEncoder|PatchReconstructor"
    "|Captioner|RewardModel|TransformerModel"
)


class Source(NamedTuple):
    """A Python file of the package."""

    name: str
    """path below `transformer/`, such as `nn/_masks.py`"""
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.split("/")[0] if "/" in self.name else ""


def sources(checkout: Path) -> list[Source]:
    """Return the files of the package in a checkout."""
    package = checkout / "transformer"
    paths = sorted(package.rglob("*.py"))
    if not paths:
        raise SystemExit(f"error: {checkout} has no Python files in transformer/. Pass the root of a checkout.")
    texts = [(path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    return [Source(name, text, ast.parse(text)) for name, text in texts]


def imports_of(source: Source, names: set[str]) -> Iterator[str]:
    """Yield the files of the package that a file imports, inside of functions and for type checkers too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            modules = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        else:
            continue
        for module in modules:
            path = module.removeprefix("transformer").lstrip(".").replace(".", "/")
            if module.startswith("transformer.") and f"{path}.py" in names:
                yield f"{path}.py"


def files_in_circles(files: list[Source]) -> dict[str, int]:
    """Return, for each room with a circle of imports within it, the number of files in its circles."""
    names = {file.name for file in files}
    rooms = {file.name: file.room for file in files}
    below = {file.name: {one for one in imports_of(file, names) if rooms[one] == file.room} for file in files}
    reached = {name: set(direct) for name, direct in below.items()}
    for _ in files:  # a path has at most as many steps as there are files
        for found in reached.values():
            found |= set().union(*(reached[one] for one in found))
    return dict(Counter(rooms[name] for name, found in reached.items() if name in found and rooms[name]))


def comment_share(files: list[Source]) -> str:
    """Return the number of lines with a comment for each 100 lines of code, docstrings not counted."""
    comments = code = 0
    for file in files:
        lines: dict[int, set[int]] = {tokenize.COMMENT: set(), tokenize.OP: set()}
        for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
            if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|ruff|pragma)", token.string):
                lines[tokenize.COMMENT].add(token.start[0])
            elif token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
                lines[tokenize.OP].add(token.start[0])
        comments += len(lines[tokenize.COMMENT])
        code += len(lines[tokenize.OP])
    return f"{100 * comments / max(code, 1):.1f}"


def fields_of(files: list[Source], name: str, parts: bool) -> int:
    """Return the number of fields of a config class; with `parts`, those of configs in it count instead of them."""
    classes = {
        node.name: node
        for file in files
        if file.room == "config"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
    }
    if name not in classes:
        return 0
    count = 0
    for field in (node for node in classes[name].body if isinstance(node, ast.AnnAssign)):
        part = next((one for one in re.findall(r"[A-Z]\w+", ast.unparse(field.annotation)) if one in classes), None)
        count += fields_of(files, part, parts) if parts and part and part != name else 1
    return count


def shared_names(files: list[Source]) -> int:
    """Return how many files of the rooms to compare have a name that another of them has too."""
    names = Counter(
        Path(file.name).stem
        for file in files
        if file.room in ROOMS_TO_COMPARE and not file.name.endswith("__init__.py")
    )
    return sum(count for count in names.values() if count > 1)


def calls_to(files: list[Source], pattern: str) -> int:
    return sum(len(re.findall(pattern, file.text)) for file in files)


def annotations_any(files: list[Source]) -> int:
    """Return the number of parameters, results and fields whose type is `Any` as a whole, or another name of it."""
    names = {"Any"} | {
        ast.unparse(target)
        for file in files
        for node in file.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name) and node.value.id == "Any"
        for target in getattr(node, "targets", None) or [node.target]
    }
    annotations = [
        getattr(node, "annotation", None) or getattr(node, "returns", None)
        for file in files
        for node in ast.walk(file.tree)
    ]
    return sum(isinstance(one, ast.Name) and one.id in names for one in annotations)


def methods_of(files: list[Source], name: str) -> int:
    """Return the number of methods of a class, special ones included."""
    return sum(
        isinstance(inner, ast.FunctionDef)
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef) and node.name == name
        for inner in node.body
    )


def room(files: list[Source], *names: str) -> list[Source]:
    return [file for file in files if file.room in names]


def readme_words(checkout: Path) -> int:
    return len((checkout / "README.md").read_text(encoding="utf-8").split())


Count = Callable[[Path, list[Source]], object]
COUNTS: dict[str, Count] = {
    "lines in `transformer/`": lambda _, files: f"{sum(file.text.count(chr(10)) for file in files):,}",
    "files longer than 600 lines": lambda _, files: sum(file.text.count("\n") > 600 for file in files),
    "files in circles of imports within a room": lambda _, files: (
        ", ".join(f"{name} {count}" for name, count in sorted(files_in_circles(files).items())) or "0"
    ),
    "`isinstance` with a class of models": lambda _, files: calls_to(files, rf"isinstance\([^()]*\b(?:{MODELS})\b"),
    "fields of `TransformerConfig`": lambda _, files: fields_of(files, "TransformerConfig", parts=False),
    "the same with the fields of its parts": lambda _, files: fields_of(files, "TransformerConfig", parts=True),
    "annotations that are `Any`": lambda _, files: annotations_any(files),
    "`**given`": lambda _, files: calls_to(files, r"\*\*given\b"),
    "compiled decoding loops (`while_loop` in `generate/`)": lambda _, files: calls_to(
        room(files, "generate"), r"\bwhile_loop\("
    ),
    "methods of the server's `Engine`": lambda _, files: methods_of(files, "Engine"),
    "files of training, inference and serve that share a name": lambda _, files: shared_names(files),
    "lines with comments per 100 lines of code": lambda _, files: comment_share(files),
    "the same in `nn/`": lambda _, files: comment_share(room(files, "nn")),
    "words of the README": lambda checkout, _: f"{readme_words(checkout):,}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(".")], help="roots of checkouts")
    checkouts = parser.parse_args().checkouts
    files = [sources(checkout) for checkout in checkouts]
    print("|".join(["", " count ", *(f" {checkout} " for checkout in checkouts), ""]))
    print("|".join(["", " --- ", *(" ---: " for _ in checkouts), ""]))
    for name, count in COUNTS.items():
        values = [count(*pair) for pair in zip(checkouts, files, strict=True)]
        print("|".join(["", f" {name} ", *(f" {value} " for value in values), ""]))


if __name__ == "__main__":
    main()
