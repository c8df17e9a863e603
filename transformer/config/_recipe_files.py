"""Find recipe files by name, in the user's `configs/` and among the bundled recipes."""

from __future__ import annotations

import os
from pathlib import Path

from transformer.config._checks import ConfigError, nearest
from transformer.config._local_paths import local_path

SAVED_RECIPE = "recipe.json"
"""name of the file with the recipe of a run, by which the workdir of a run is recognized"""
_PACKAGE = Path(__file__).resolve().parents[1]


def bundled() -> Path:
    """Return the folder of the bundled recipes.

    A wheel contains them as `transformer/recipes/`. A checkout and an editable installation use `configs/`, next to the
    package, so that the repository does not contain them twice.
    """
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def recipe_files(*directories: str | os.PathLike) -> dict[str, Path]:
    """Return the files `configs/*.py` of the directories by name, sorted; of several with one name, the first.

    Without directories, search the current one, then the bundled recipes. Names with an underscore first are ignored.
    """
    folders = [local_path(directory, "the directory") / "configs" for directory in directories]
    folders = folders or [Path.cwd() / "configs", bundled()]
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_"):
                found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def find_recipe(name: str, *directories: str | os.PathLike) -> Path:
    """Return the file of a recipe: `name` is its path, with or without .py, or a name in `recipe_files(*directories)`.

    Raises ConfigError if there is no such file; the message suggests the most similar name and lists all names.
    """
    local_path(name, "the recipe")
    known = recipe_files(*directories)
    for path in (Path(name), Path(f"{name}.py")):
        if os.path.isfile(path):  # Path.is_file raises for a name that is too long
            return path
    stem = Path(name).name.removesuffix(".py")
    if stem in known and str(Path(name).parent) in (".", "configs"):
        return known[stem]
    listed = f" Available recipes: {', '.join(known)}." if known else ""
    raise ConfigError(
        f"there is no recipe {name!r}.{nearest(stem, known)}{listed} Use --list to show their descriptions."
    )
