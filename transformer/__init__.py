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
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer.config import *  # noqa: F403
    from transformer.inference import load as load
    from transformer.inference import save as save
    from transformer.nn import *  # noqa: F403

__version__ = "0.1.0"

_MOVED = {
    "chips": "training.chips",
    "foreign": "config.untrusted",
    "invocation": "config.invocation",
    "lora": "training.lora",
    "plan": "training.plan",
    "recipe_files": "config.recipe_files",
    "studies": "viz.studies",
    "weights": "zoo.weights",
}
"""modules that had another name up to version 0.1: old name -> new name, both in this package; others are in `nn`"""

_RENAMED = {
    "inference/opening": "_loading",
    "nn/kernels/chunked": "_blockwise",
    "nn/kernels/sliced": "_query_chunked",
    "training/calls": "_invocations",
    "training/numbers": "_numeric_evaluation",
}
"""files that were renamed in their folder: old path -> new file name"""


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
    if not name.startswith("_"):
        if (home := _exports().get(name)) is not None:
            return getattr(importlib.import_module(home), name)
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'transformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_exports()})


def _current_name(name: str) -> str | None:
    """The module that `name` stands for: itself, one of `_MOVED`, or the private file `_masks.py` for `masks`."""
    top, *below = name.split(".")[1:]
    parts = [*_MOVED.get(top, top).split("."), *below]
    folder = Path(__file__).parent
    if not (folder / parts[0]).is_dir() and not (folder / f"{parts[0]}.py").is_file():
        parts.insert(0, "nn")
    found = [__name__]
    for part in parts:
        part = _RENAMED.get("/".join([*found[1:], part]), part)
        if not (folder / part).is_dir() and not (folder / f"{part}.py").is_file():
            part = f"_{part}"
            if not (folder / f"{part}.py").is_file():
                return None
        found.append(part)
        folder = folder / part
    return ".".join(found)


class _Room(types.ModuleType):
    """A package whose public names stay what they are when a module that was called like one of them is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        moved = isinstance(value, types.ModuleType) and value.__name__ != f"{self.__name__}.{name}"
        if not (moved and name in self.__all__):
            super().__setattr__(name, value)


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `transformer.masks` and `transformer.nn.masks` as `transformer.nn._masks`, with a warning, and so on for
    every module that moved or became private: the same module, not a second copy of it.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        package, _, rest = fullname.partition(".")
        if package != __name__ or not rest or rest.rpartition(".")[2].startswith("_"):
            return None
        new = _current_name(fullname)
        return None if new in (None, fullname) else importlib.machinery.ModuleSpec(fullname, self, origin=new)

    def create_module(self, spec: Any) -> Any:
        room, _, private = spec.origin.partition("._")
        now = f"private: import its public names from {room}" if private else f"now {spec.origin}: import that"
        warnings.warn(f"{spec.name} is {now}. The old name works for one release.", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__  # the import system overwrites it before `exec_module`
        parent, _, name = spec.name.rpartition(".")
        if name in getattr(sys.modules[parent], "__all__", ()) and parent != __name__:
            sys.modules[parent].__class__ = _Room
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _MovedModules())  # before the finder that would load a second copy of a file
