"""Which test files import a file of the package, found without running them."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections import Counter
from pathlib import Path


@functools.cache
def imports(path: Path, root: Path) -> frozenset[Path]:
    """Return the files of the checkout that a file imports.

    A name that a package re-exports leads to the file that defines it, so that `from transformer.nn import Mask` is an
    import of transformer/nn/_masks.py.
    """
    found = set()
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            found |= {file for alias in node.names if (file := _file(alias.name, root))}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                file = _file(f"{node.module}.{alias.name}", root) or _defining(node.module, alias.name, root)
                found |= {file} if file else set()
    return frozenset(found)


def distances(path: Path, root: Path, most: int = 3) -> dict[Path, int]:
    """Return the files that a file imports directly (1), through another file (2), and so on up to `most`."""
    found, last = {path: 0}, [path]
    for distance in range(1, most + 1):
        last = [file for one in last for file in imports(one, root) if file not in found]
        found |= dict.fromkeys(last, distance)
    return found


def nearest_tests(root: Path, changed: str, most: int, code: str = "") -> list[str]:
    """Return at most `most` test files that import a file, as paths relative to the root.

    They are taken in turn from two orders. Nearest first: among files at the same distance, one in a folder with the
    name of the changed file's folder comes first, and one whose name contains the name of the file first of all. Most
    similar first: the words that a test shares with `code`, each with the weight log(number of tests / number of tests
    with this word) (Sparck Jones 1972), as a test names the options and functions that it tests.

    Args:
        root: folder of the checkout.
        changed: path of the file, relative to the root.
        most: maximum number of files.
        code: the changed function.
    """
    target = root / changed
    nearest, similar = [], []
    words = _words_of(code)
    for test in _test_files(root):
        distance = _distances(test, root).get(target)
        if distance is not None:
            named = target.stem.strip("_") in test.stem
            same_folder = target.parent.name in test.parts
            nearest.append((not named, distance, not same_folder, test))
            shared = words & _words(test)
            similar.append((-sum(map(_weights(root).__getitem__, sorted(shared))), test))
    both = zip(sorted(nearest), sorted(similar), strict=True)
    tests = dict.fromkeys(test for pair in both for *_, test in pair)
    return [str(test.relative_to(root)) for test in [*tests][:most]]


def _words_of(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z][A-Za-z_]{3,}", text))


@functools.cache
def _words(test: Path) -> frozenset[str]:
    return _words_of(test.read_text(encoding="utf-8"))


@functools.cache
def _weights(root: Path) -> dict[str, float]:
    """Return the weight of each word in the tests."""
    tests = _test_files(root)
    found = Counter(word for test in tests for word in _words(test))
    return {word: math.log(len(tests) / count) for word, count in found.items()}


@functools.cache
def _distances(test: Path, root: Path) -> dict[Path, int]:
    return distances(test, root)


@functools.cache
def _test_files(root: Path) -> list[Path]:
    """Return the test files, without those of `make parity`, which run in another environment."""
    return sorted(path for path in (root / "tests").rglob("test_*.py") if not path.stem.endswith("parity"))


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _file(module: str, root: Path) -> Path | None:
    """Return the file of a module of the checkout; helpers of the tests are top-level modules."""
    for folder in (root, root / "tests"):
        path = folder.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


@functools.cache
def _defining(module: str, name: str, root: Path) -> Path | None:
    """Return the file that defines a name which a package imports, or the package itself."""
    file = _file(module, root)
    if file is None or file.name != "__init__.py":
        return file
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _file(f"{node.module}.{alias.name}", root) or _defining(node.module, alias.name, root)
    return file
