"""The command line: `python -m transformer VERB`, one verb a file; and what notebooks need of it.

A name is imported when it is asked for: a verb starts with what it needs itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer.cli._compile_cache import *  # noqa: F403
    from transformer.cli._devices import *  # noqa: F403

_EXPORTS = {
    "_compile_cache": ("keep_compiled",),
    "_devices": ("accelerator_present",),
}
"""file -> the public names that it defines"""

_MODULES = ("runtime",)

__all__ = sorted([*_MODULES, *(name for names in _EXPORTS.values() for name in names)])


def __getattr__(name: str) -> Any:
    """Imports the file of a public name when the name is asked for."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
