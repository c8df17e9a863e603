"""The names that each package exports, read without importing it."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "transformer"


@functools.cache
def assigned(path: Path, name: str) -> object:
    """Return the value of a constant in a file, or None if the file does not define it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def exports(path: Path) -> set[str]:
    """Return `__all__` of a file. Packages with lazy imports compute it from `_EXPORTS` and `_MODULES`."""
    late = assigned(path, "_EXPORTS")
    if late is None:
        return set(assigned(path, "__all__") or ())
    return {*(assigned(path, "_MODULES") or ()), *(name for names in late.values() for name in names)}


def rooms() -> dict[str, Path]:
    """Return the public modules by dotted name: all subpackages, and the files without an underscore."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE]
    public = [path for path in paths if path.name == "__init__.py" or not path.name.startswith("_")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in public}


def exporters(path: Path) -> set[str]:
    """Return the names that the packages around a file export: that of its own folder, and all above it."""
    found = exports(path) if not path.name.startswith("_") else set()
    folder = path.parent
    while folder != PACKAGE:
        found |= exports(folder / "__init__.py")
        folder = folder.parent
    return found
