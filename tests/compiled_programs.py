"""The compilation cache of the tests, which all workers, started processes and later runs share.

The key of an entry is a hash of the program itself, the version of jaxlib, the flags of XLA and the kind of device.
After a change of the code, a changed program has another key and is compiled, and an unchanged one is read. So an entry
cannot be stale (tests/system/test_compiled_programs.py).
"""

import importlib.metadata
import os
import pathlib
import time

VARIABLE = "TRANSFORMER_TEST_CACHE"
"""folder of the cache; an empty value turns the cache off"""
LEAST_SECONDS = 0.1
"""minimum compile time of a stored program: for a faster one, writing and reading take as long as compiling"""
DAYS = 14
"""entries that were written earlier are deleted, so that programs of earlier code do not fill the disk"""


def use(environment=os.environ) -> None:
    """Set JAX's variables, which this process and its children read when they import JAX.

    Raises:
        SystemExit: the folder cannot be created or written.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environment:  # of the user, or of the process that started this one
        return
    default = pathlib.Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "transformer-zoo" / "tests"
    chosen = environment.get(VARIABLE, str(default))
    if not chosen:
        environment["JAX_COMPILATION_CACHE_DIR"] = ""
        return
    folder = pathlib.Path(chosen) / f"jaxlib-{importlib.metadata.version('jaxlib')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to read and write {folder}")
        delete_old(folder)
    except OSError as error:
        raise SystemExit(
            f"error: the compilation cache of the tests needs a writable folder, got {folder} ({error}). "
            f"Set {VARIABLE} to another folder, or to nothing: {VARIABLE}= make test"
        ) from None
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(LEAST_SECONDS)


def delete_old(folder: pathlib.Path) -> None:
    """Delete entries that were written more than `DAYS` ago."""
    limit = time.time() - DAYS * 24 * 3600
    for entry in folder.iterdir():
        try:
            if entry.stat().st_mtime < limit:
                entry.unlink()
        except FileNotFoundError:  # another worker deleted it
            continue
