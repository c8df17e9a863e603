"""Recipes by name: the files of the user's `configs/`, and those that come with this project."""

from __future__ import annotations

import os
from pathlib import Path

from transformer.config._checks import ConfigError, nearest

_PACKAGE = Path(__file__).resolve().parents[1]


def bundled() -> Path:
    """The folder of the recipes that come with this project.

    A wheel contains them as `transformer/recipes/`. A checkout and an editable installation use `configs/`, beside the
    package: the repository has no second copy.
    """
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def recipe_files(*directories: str | os.PathLike) -> dict[str, Path]:
    """Recipe files by name.

    Args:
        *directories: each is searched for `configs/*.py`, and the first file of a name wins. Without any, the current
            directory is searched, then the bundled recipes. Names that begin with an underscore are no recipes.
    """
    folders = [Path(directory) / "configs" for directory in directories] or [Path.cwd() / "configs", bundled()]
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_"):
                found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def find_recipe(name: str, *directories: str | os.PathLike) -> Path:
    """The file of a recipe, given its path (with or without .py) or its name (`recipe_files` has the search order).

    Raises:
        ConfigError: there is no such file; the message suggests the nearest name and lists all of them.
    """
    known = recipe_files(*directories)
    for path in (Path(name), Path(f"{name}.py")):
        if os.path.isfile(path):  # Path.is_file raises for a name that is too long
            return path
    stem = Path(name).name.removesuffix(".py")
    if stem in known and str(Path(name).parent) in (".", "configs"):
        return known[stem]
    listed = f" There are {', '.join(known)}." if known else ""
    raise ConfigError(f"there is no recipe {name!r}.{nearest(stem, known)}{listed} --list says what each is.")
