"""Folders that are made once per run of the tests, by the first worker that needs them, and copied by every user."""

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

_roots: list[Path] = []
"""folder that all workers of this run share; set by the fixture `shared_folders` of tests/conftest.py"""


@contextlib.contextmanager
def kept_in(root: Path):
    """Keep the folders in `root`."""
    _roots.append(root)
    try:
        yield
    finally:
        _roots.remove(root)


def copy_once_made(name: str, make: Callable[[Path], object], target: Path) -> Path:
    """Copy a folder to `target` and return it.

    Args:
        name: everything that the contents depend on.
        make: fills the empty folder that it is given. If it fails, the next user tries again.
        target: a folder that may exist. Its user may change it.
    """
    target = Path(target)
    if not _roots:
        target.mkdir(parents=True, exist_ok=True)
        make(target)
        return target
    made = _roots[-1] / hashlib.sha256(name.encode()).hexdigest()[:24]
    with FileLock(f"{made}.lock"):
        if not made.exists():
            unfinished = made.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(made)
    return Path(shutil.copytree(made, target, dirs_exist_ok=True))
