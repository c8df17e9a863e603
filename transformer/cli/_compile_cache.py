"""Compiled programs are kept on disk: what was compiled once need not be compiled the next time."""

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
"""bytes that are kept; beyond them what was used longest ago goes"""
LEAST_SECONDS = 0.3
"""a program that compiles sooner is not worth a file"""
WARNINGS = "Error reading persistent compilation cache", "Error writing persistent compilation cache"
"""how JAX's warnings begin"""
ENTRY, LAST_READ = "-cache", "-atime"
"""how the names of JAX's files end: a compiled program, and when it was used last"""

_said: set[tuple[bool, str]] = set()


def keep_compiled(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has JAX keep what it compiles, in `transformer-zoo/compiled` of the user's folder for caches (`XDG_CACHE_HOME`,
    or ~/.cache), a folder for each kind of processor: what is compiled for one may not run on another. JAX finds a
    program again by what it computes, its versions, devices and flags; of a damaged file it warns, and compiles anew,
    until somebody deletes the folder.

    Does nothing where `JAX_COMPILATION_CACHE_DIR` says what the user wants (`JAX_COMPILATION_CACHE_DIR= python ...`
    turns it off), or where that folder can't be read and written. Call it before JAX compiles anything.
    """
    if VARIABLE in environment:
        return
    try:
        folder = _folder(environment)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or none to write into
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return
    settings = {VARIABLE: str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": LEAST_SECONDS}
    if importlib.util.find_spec("filelock"):  # which JAX counts the bytes by
        settings["JAX_COMPILATION_CACHE_MAX_SIZE"] = MOST
    chosen = {name: value for name, value in settings.items() if name not in environment}
    environment.update({name: str(value) for name, value in chosen.items()})
    if jax := sys.modules.get("jax"):  # it has read its variables already
        for name, value in chosen.items():
            jax.config.update(name.lower(), value)


def is_cache_warning(text: str) -> bool:
    """Whether a warning of JAX says that it could not read or write what is kept."""
    return text.startswith(WARNINGS)


def repair_cache(text: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Deletes the file of the cache that a warning of JAX is about: JAX compiles anew, but keeps the damaged file and
    would warn of it at every start. In a folder that the user chose nothing is deleted.

    Returns:
        what to say instead of the warning; None where this process has said it before.
    """
    folder = environment.get(VARIABLE, "")
    try:
        ours = bool(folder) and Path(folder) == _folder(environment)
        deleted = ours and (_delete_named(Path(folder), text) or _delete_damaged(Path(folder), text))
    except (OSError, RuntimeError):
        deleted = False
    if (deleted, folder) in _said:
        return None
    _said.add((deleted, folder))
    if deleted:
        return f"a damaged file of the compile cache was deleted and is compiled anew ({folder})."
    return f"the compile cache {folder} can't be used: {text.partition(': ')[2]}. Delete it, or set {VARIABLE}= ."


def _delete_named(folder: Path, text: str) -> bool:
    """Deletes the file that an error of the system names, such as one that this user may not read."""
    if found := re.search(rf"\[Errno \d+\] .*'({re.escape(str(folder))}/[^/']+)'", text):
        _delete(Path(found[1]))
    return bool(found)


def _delete_damaged(folder: Path, text: str) -> bool:
    """Deletes the damaged file that JAX has read, which is mostly the one that was read last."""
    if not text.startswith(WARNINGS[0]):
        return False
    entries = sorted(folder.glob(f"*{ENTRY}"), key=_last_read, reverse=True)
    damaged = next((entry for entry in entries if not _is_whole(entry)), None)
    if damaged is None and entries and _last_read(entries[0]):  # whole, and yet not to be loaded
        damaged = entries[0]
    if damaged is not None:
        _delete(damaged)
    return damaged is not None


def _delete(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
    for suffix in (ENTRY, LAST_READ):  # the time of an entry is nothing without it, and the other way around
        entry.with_name(re.sub(f"({ENTRY}|{LAST_READ})$", suffix, entry.name)).unlink(missing_ok=True)


def _last_read(entry: Path) -> float:
    """When an entry was read, of which JAX keeps a file where it counts the bytes; else 0."""
    try:
        return entry.with_name(entry.name.removesuffix(ENTRY) + LAST_READ).stat().st_mtime
    except OSError:
        return 0.0


def _is_whole(entry: Path) -> bool:
    """Whether the compression of an entry is intact, its checksum included. Only zlib is checked here: JAX uses
    zstandard where that is installed.
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
    """A name for processors that run the same programs."""
    facts = [platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:  # not Linux
        facts.append(platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
