"""A model zoo of transformers in JAX and Flax: pure functions for numerics, small modules that own the parameters.

`transformer.NAME` is any name in `__all__` of `transformer.nn` or `transformer.config`, or one of the functions `load`,
`save` and `open` (`open_model`) of `transformer.inference`. These three need optional dependencies: install the extra
`train` for the run directories, and the extra `zoo` for pretrained weights.
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
    from transformer.inference import open_model as open  # noqa: F401
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
"""modules that had another name in version 0.1 and earlier: old name -> new name, both relative to this package. Old
modules that are not listed are now in `nn`"""

_RENAMED = {
    "inference/opening": "_loading",
    "nn/kernels/chunked": "_blockwise",
    "nn/kernels/sliced": "_query_chunked",
}
"""files that were renamed within their folder: old path -> new file name"""


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


def _current_name(name: str) -> str | None:
    """Return the current full name of a module, or None if there is no such module.

    `name` is a current name, an old name in `_MOVED` or `_RENAMED`, or the name of a file that became private: `masks`
    for `nn/_masks.py`.
    """
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


class _Package(types.ModuleType):
    """A package with a public name that an old submodule also had, such as a function `NAME` and a file `NAME.py`.

    After importing `package.NAME` the import system assigns the module to the attribute `NAME` of the package. This
    class ignores that assignment, so `package.NAME` remains the public name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        moved = isinstance(value, types.ModuleType) and value.__name__ != f"{self.__name__}.{name}"
        if not (moved and name in self.__all__):
            super().__setattr__(name, value)


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import every module that was moved or became private under its old name too, with a DeprecationWarning.

    For example, `transformer.masks` and `transformer.nn.masks` both return the module object of `transformer.nn._masks`
    rather than a second copy of it. With two copies, `isinstance` checks on their classes would fail.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        package, _, rest = fullname.partition(".")
        if package != __name__ or not rest or rest.rpartition(".")[2].startswith("_"):
            return None
        new = _current_name(fullname)
        return None if new in (None, fullname) else importlib.machinery.ModuleSpec(fullname, self, origin=new)

    def create_module(self, spec: Any) -> Any:
        package, _, private = spec.origin.partition("._")
        now = f"private: import its public names from {package}" if private else f"now {spec.origin}: import that"
        warnings.warn(f"{spec.name} is {now}. The former name works for one release.", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__  # the import system overwrites `__spec__` before it calls `exec_module`
        parent, _, name = spec.name.rpartition(".")
        if name in getattr(sys.modules[parent], "__all__", ()) and parent != __name__:
            sys.modules[parent].__class__ = _Package
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state


# First in the list: the default finder would import the files of a moved package a second time, under the old name.
sys.meta_path.insert(0, _MovedModules())
