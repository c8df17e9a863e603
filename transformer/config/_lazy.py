"""Lazy imports of the public names of a package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package whose names are imported on first use.

    `exports` has the public names by the module of the package that defines them; `modules` are its public modules.
    """
    public = sorted([*modules, *(name for names in exports.values() for name in names)])

    def getattr_(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        for module, names in exports.items():
            if name in names:
                return getattr(importlib.import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return public, getattr_, lambda: sorted({*vars(sys.modules[package]), *public})
