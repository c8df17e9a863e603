"""Persistent compilation cache: compiled programs are stored on disk to make later runs start faster."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MOST = 2 * 1024**3
"""maximum size of the cache in bytes; beyond it, JAX deletes the least recently used programs"""
LEAST_SECONDS = 0.3
"""minimum compile time of a stored program, in seconds"""
WARNINGS = "Error reading persistent compilation cache", "Error writing persistent compilation cache"
"""beginnings of JAX's warnings about the cache"""
ENTRY, LAST_READ = "-cache", "-atime"
"""suffixes of the names of JAX's files: a compiled program, and the time when it was last used"""

_reported: set[tuple[bool, str]] = set()


def keep_compiled(environment: MutableMapping[str, str] = os.environ) -> None:
    """Enable JAX's persistent compilation cache.

    The cache is in `transformer-zoo/compiled` in the user's cache folder (`XDG_CACHE_HOME`, or ~/.cache), with one
    subfolder per kind of processor, because a program compiled for one processor may not run on another. JAX's cache
    key covers the computation, the library versions, the devices and the flags. If a file is damaged, JAX warns and
    recompiles, at every start, until the file is deleted; see `repair_cache`.

    The function does nothing if `JAX_COMPILATION_CACHE_DIR` is set (`JAX_COMPILATION_CACHE_DIR= python ...` disables
    the cache), or if the folder can't be read and written. Call it before JAX compiles anything.
    """
    if VARIABLE in environment:
        return
    try:
        folder = _folder(environment)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home directory, or it is not writable
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return
    settings = {VARIABLE: str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": LEAST_SECONDS}
    if importlib.util.find_spec("filelock"):  # JAX needs it to limit the size
        settings["JAX_COMPILATION_CACHE_MAX_SIZE"] = MOST
    chosen = {name: value for name, value in settings.items() if name not in environment}
    environment.update({name: str(value) for name, value in chosen.items()})
    if jax := sys.modules.get("jax"):  # JAX read the environment when it was imported
        for name, value in chosen.items():
            jax.config.update(name.lower(), value)


def repair_cache(text: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Delete the damaged cache file that a warning of JAX reports; return the message to print instead, None if it was.

    JAX recompiles the program, but it does not replace the damaged file, and would warn at every start. Nothing is
    deleted in a folder that the user chose.
    """
    folder = environment.get(VARIABLE, "")
    try:
        ours = bool(folder) and Path(folder) == _folder(environment)
        deleted = ours and (_delete_named(Path(folder), text) or _delete_damaged(Path(folder), text))
    except (OSError, RuntimeError):
        deleted = False
    if (deleted, folder) in _reported:
        return None
    _reported.add((deleted, folder))
    if deleted:
        return f"a damaged file of the compilation cache was deleted; its program is compiled again ({folder})."
    return f"the compilation cache {folder} can't be used: {text.partition(': ')[2]}. Delete it, or set {VARIABLE}= ."


def _delete_named(folder: Path, text: str) -> bool:
    """Delete the file that an operating system error names, such as one that this user may not read."""
    if found := re.search(rf"\[Errno \d+\] .*'({re.escape(str(folder))}/[^/']+)'", text):
        _delete(Path(found[1]))
    return bool(found)


def _delete_damaged(folder: Path, text: str) -> bool:
    """Delete the damaged file that JAX has read, which is usually the most recently read one."""
    if not text.startswith(WARNINGS[0]):
        return False
    entries = sorted(folder.glob(f"*{ENTRY}"), key=_last_read, reverse=True)
    damaged = next((entry for entry in entries if not _is_whole(entry)), None)
    if damaged is None and entries and _last_read(entries[0]):  # JAX can't load it, although it is not truncated
        damaged = entries[0]
    if damaged is not None:
        _delete(damaged)
    return damaged is not None


def _delete(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
    for suffix in (ENTRY, LAST_READ):  # a program and its time of last use belong together
        entry.with_name(re.sub(f"({ENTRY}|{LAST_READ})$", suffix, entry.name)).unlink(missing_ok=True)


def _last_read(entry: Path) -> float:
    """Return when an entry was last read, or 0. JAX stores this time only if it limits the size of the cache."""
    try:
        return entry.with_name(entry.name.removesuffix(ENTRY) + LAST_READ).stat().st_mtime
    except OSError:
        return 0.0


def _is_whole(entry: Path) -> bool:
    """Return whether the compressed data of an entry is intact, including its checksum.

    Only zlib data is checked. JAX uses zstandard if that is installed; then the result is always True.
    """
    if importlib.util.find_spec("zstandard"):
        return True
    try:
        zlib.decompress(entry.read_bytes())
    except (OSError, zlib.error):
        return False
    return True


def _folder(environment: Mapping[str, str]) -> Path:
    caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "transformer-zoo" / "compiled" / _processor()


def _processor() -> str:
    """Return a name that is the same for all processors that can run the same compiled programs."""
    facts = [platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:  # not Linux
        facts.append(platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
