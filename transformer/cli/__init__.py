"""The command line, `python -m transformer COMMAND`: one file per command, and functions that the notebooks call.

Public names are imported on first use: each command imports only the modules that it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.cli._compile_cache import *  # noqa: F403
    from transformer.cli._devices import *  # noqa: F403

_EXPORTS = {"_compile_cache": ("keep_compiled",), "_devices": ("accelerator_present",)}
"""public names by the file that defines them"""

_MODULES = ("runtime",)

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS, _MODULES)
