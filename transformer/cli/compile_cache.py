"""Compiled programs are kept on disk: what was compiled once need not be compiled the next time."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MOST = 2 * 1024**3
"""bytes that are kept; beyond them what was used longest ago goes"""
OWN_FOLDER = ("transformer-zoo", "compiled")
"""in the user's folder for caches"""
READ_ERROR = "Error reading persistent compilation cache entry"
"""how JAX's warning begins"""
ZSTANDARD = b"\x28\xb5\x2f\xfd"
"""first bytes of a file that zstandard compressed (RFC 8878, section 3.1.1); JAX uses zlib without that package"""
LEAST_SECONDS = 0.3
"""a program that compiles sooner is not worth a file"""


def keep_compiled(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has JAX keep what it compiles, in `transformer-zoo/compiled` of the user's folder for caches (`XDG_CACHE_HOME`,
    or ~/.cache), a folder for each kind of processor: what is compiled for one may not run on another. JAX finds a
    program again by what it computes, its versions, devices and flags. Of a damaged file it warns, and compiles anew:
    `repair_after` then deletes the file, so that a whole one can take its place.

    Does nothing where `JAX_COMPILATION_CACHE_DIR` says what the user wants (`JAX_COMPILATION_CACHE_DIR= python ...`
    turns it off), or where that folder can't be written. Call it before JAX compiles anything.
    """
    if VARIABLE in environment:
        return
    try:
        caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches.joinpath(*OWN_FOLDER, _processor())
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


def repair_after(warning: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Delete damaged files of our cache after JAX's warning that it could not read one. JAX itself never replaces a
    file, so that it would warn in every run.

    Returns:
        How many files were deleted; None if it is another warning, or a cache that the user chose.
    """
    folder = Path(environment.get(VARIABLE, ""))
    if not warning.startswith(READ_ERROR) or folder.parent.parts[-2:] != OWN_FOLDER:
        return None
    files = list(folder.glob("*-cache"))
    damaged = [file for file in files if not _is_whole(file)]
    # Damage that decompression does not notice is in the file that was read last.
    stamps = [file.with_name(file.name.removesuffix("-cache") + "-atime") for file in files]
    if not damaged and (read := [stamp for stamp in stamps if stamp.exists()]):
        last = max(read, key=lambda stamp: stamp.stat().st_mtime_ns)
        damaged = [last.with_name(last.name.removesuffix("-atime") + "-cache")]
    for file in damaged:
        file.unlink(missing_ok=True)
    return len(damaged)


def _is_whole(file: Path) -> bool:
    """Whether a file of the cache can be decompressed, as far as the package for that is installed."""
    try:
        content = file.read_bytes()
        if content[:4] != ZSTANDARD:
            zlib.decompress(content)
        elif importlib.util.find_spec("zstandard"):
            import zstandard

            zstandard.ZstdDecompressor().decompress(content)
    except FileNotFoundError:  # deleted by another process
        return True
    except Exception as error:
        # zstandard.ZstdError, zlib.error: a file that can't be read is of no use either.
        return isinstance(error, MemoryError)
    return True


def _processor() -> str:
    """A name for processors that run the same programs."""
    facts = [platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:  # not Linux
        facts.append(platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
