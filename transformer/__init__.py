"""A model zoo of transformers in JAX and Flax: pure functions for numerics, small modules that own the parameters.

`transformer.NAME` is any name in `__all__` of `transformer.nn` or `transformer.config`, or one of the functions `load`,
`save` and `open` (`open_model`) of `transformer.inference`. These three need optional dependencies: install the extra
`train` for the run directories, and the extra `zoo` for pretrained weights.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer.config import *  # noqa: F403
    from transformer.inference import load as load
    from transformer.inference import open_model as open  # noqa: F401
    from transformer.inference import save as save
    from transformer.nn import *  # noqa: F403

__version__ = "0.2.0"
"""pyproject.toml reads the version of the distribution from here"""


def _exports() -> dict[str, str]:
    """Return the public names, each with the module that defines or re-exports it."""
    homes = dict.fromkeys(("load", "save"), "transformer.inference")
    for home in ("transformer.config", "transformer.nn"):
        homes |= dict.fromkeys(importlib.import_module(home).__all__, home)
    return homes


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that `import transformer` does not import JAX.

    The command line relies on this: its process restarts once, and should not import JAX before it does.
    """
    if name == "__all__":
        return sorted(_exports())  # without `open`: `from transformer import *` must not replace the builtin
    if name == "open":
        return importlib.import_module("transformer.inference").open_model
    if not name.startswith("_"):
        if (home := _exports().get(name)) is not None:
            return getattr(importlib.import_module(home), name)
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'transformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_exports()})
