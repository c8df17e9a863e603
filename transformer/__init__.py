"""A model zoo of transformers in JAX and Flax: pure functions for numerics, small modules that own the parameters.

`transformer.NAME` is any name in `__all__` of `transformer.nn` and `transformer.config`, and `load` and `save` of
`transformer.inference`, which need extras: `train` for workdirs, `zoo` for pretrained weights.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer.config import *  # noqa: F403
    from transformer.inference import load as load
    from transformer.inference import save as save
    from transformer.nn import *  # noqa: F403

__version__ = "0.1.0"

_IN_NN = """attention axes blocks caches compat int8 jax_compat kernels layers masks mla models moe parameter_axes
partitioning positions sharding stacks"""

_MOVED = {
    "chips": "training.chips",
    "foreign": "config.untrusted",
    "invocation": "config.invocation",
    "lora": "training.lora",
    "plan": "training.plan",
    "recipe_files": "config.recipe_files",
    "studies": "viz.studies",
    "weights": "zoo.weights",
} | {name: f"nn.{name}" for name in _IN_NN.split()}
"""modules that had another name up to version 0.1: old name -> new name, both in this package"""


def _exports() -> dict[str, str]:
    """Public names -> the module that has each."""
    homes = dict.fromkeys(("load", "save"), "transformer.inference")
    for home in ("transformer.config", "transformer.nn"):
        homes |= dict.fromkeys(importlib.import_module(home).__all__, home)
    return homes


def __getattr__(name: str) -> Any:
    """Imports a name when it is asked for: the command line, which restarts itself, does without JAX until then."""
    if name == "__all__":
        return sorted(_exports())
    if name == "compat":
        return importlib.import_module("transformer.nn.compat")
    if not name.startswith("_"):
        if (home := _exports().get(name)) is not None:
            return getattr(importlib.import_module(home), name)
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'transformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_exports()})


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `transformer.masks` as `transformer.nn.masks`, with a warning, and so on for all of `_MOVED`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        package, _, rest = fullname.partition(".")
        top, _, below = rest.partition(".")
        if package != __name__ or top not in _MOVED:
            return None
        new = ".".join([__name__, _MOVED[top], *([below] if below else [])])
        return importlib.machinery.ModuleSpec(fullname, self, origin=new)

    def create_module(self, spec: Any) -> Any:
        warnings.warn(
            f"{spec.name} is now {spec.origin}: import that. The old name works for one release.",
            DeprecationWarning,
            stacklevel=2,
        )
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__  # the import system overwrites it before `exec_module`
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _MovedModules())  # before the finder that would load a second copy of a file
