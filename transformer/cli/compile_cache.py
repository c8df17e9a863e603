"""Compiled programs are kept on disk: what was compiled once need not be compiled the next time."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MOST = 2 * 1024**3
"""bytes that are kept; beyond them what was used longest ago goes"""
LEAST_SECONDS = 0.3
"""a program that compiles sooner is not worth a file"""


def keep_compiled(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has JAX keep what it compiles, in `transformer-zoo/compiled` of the user's folder for caches (`XDG_CACHE_HOME`,
    or ~/.cache), a folder for each kind of processor: what is compiled for one may not run on another. JAX finds a
    program again by what it computes, its versions, devices and flags; of a damaged file it warns, and compiles anew,
    until somebody deletes the folder.

    Does nothing where `JAX_COMPILATION_CACHE_DIR` says what the user wants (`JAX_COMPILATION_CACHE_DIR= python ...`
    turns it off), or where that folder can't be written. Call it before JAX compiles anything.
    """
    if VARIABLE in environment:
        return
    try:
        caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "transformer-zoo" / "compiled" / _processor()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or none to write into
        return
    if not os.access(folder, os.W_OK):
        return
    settings = {VARIABLE: str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": LEAST_SECONDS}
    if importlib.util.find_spec("filelock"):  # which JAX counts the bytes by
        settings["JAX_COMPILATION_CACHE_MAX_SIZE"] = MOST
    chosen = {name: value for name, value in settings.items() if name not in environment}
    environment.update({name: str(value) for name, value in chosen.items()})
    if jax := sys.modules.get("jax"):  # it has read its variables already
        for name, value in chosen.items():
            jax.config.update(name.lower(), value)


def _processor() -> str:
    """A name for processors that run the same programs."""
    facts = [platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:  # not Linux
        facts.append(platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
