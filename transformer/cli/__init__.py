"""The command line: `python -m transformer VERB`, one verb a file; and what notebooks need of it.

A name is imported when it is asked for: a verb starts with what it needs itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.cli._compile_cache import *  # noqa: F403
    from transformer.cli._devices import *  # noqa: F403

_EXPORTS = {
    "_compile_cache": ("keep_compiled",),
    "_devices": ("accelerator_present",),
}
"""file -> the public names that it defines"""

_MODULES = ("runtime",)

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS, _MODULES)
