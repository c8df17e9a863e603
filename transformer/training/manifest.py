"""A checkpoint's files with their sizes and SHA-256: written last before the commit, verified on every load."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
NAME = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: damaged, foreign, or of another model. The message says which."""


def write_manifest(directory: Path, facts: Mapping[str, Any]) -> None:
    """Hashes every file under `directory` and writes its manifest, with `facts` (JSON values) beside the list."""
    files = {}
    for path in _files(directory):
        files[path.relative_to(directory).as_posix()] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    content = {"format": FORMAT, **facts, "files": files}
    content["manifest_sha256"] = _digest(content)
    (directory / NAME).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose name is its step; CheckpointError when it is missing, damaged or foreign."""
    path = directory / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_dir() and not any(directory.iterdir()):
            raise CheckpointError(f"{directory} is empty") from None
        raise CheckpointError(
            f"{directory} has no {NAME}: half copied, or not written by this program (expected format {FORMAT})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        content = json.loads(text)
    except ValueError:
        raise CheckpointError(f"{path} is no JSON: truncated or damaged") from None
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} was not written by this program (it states no format, expected {FORMAT})")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']}, this version reads format {FORMAT}: "
            "use the version of the package that wrote it"
        )
    if content.get("manifest_sha256") != _digest(content):
        raise CheckpointError(f"{path} does not match its own SHA-256: its content has changed")
    if str(content["step"]) != directory.name:
        raise CheckpointError(f"{path} is of step {content['step']}, its directory says {directory.name}: renamed?")
    return content


def check_sizes(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Every file of the manifest is there and has its size; nothing is read. An error names the first bad one."""
    for name, expected in manifest["files"].items():
        path = directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} is missing ({error.strerror})") from error
        if size != expected["size"]:
            raise CheckpointError(f"{path} has {size} bytes, expected {expected['size']}: truncated or overwritten")


def verify(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Every file of the manifest has its size and its SHA-256. An error names the first bad one."""
    check_sizes(directory, manifest)
    for name, expected in manifest["files"].items():
        path = directory / name
        try:
            found = _sha256(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if found != expected["sha256"]:
            raise CheckpointError(
                f"{path} has SHA-256 {found[:12]}..., expected {expected['sha256'][:12]}...: its content has changed"
            )


def sync_tree(directory: Path) -> None:
    """Forces every file and directory under `directory` to the disk: a later rename must not outrun its content."""
    for path in [*_files(directory), *(Path(root) for root, _, _ in os.walk(directory))]:
        sync(path)


def sync(path: Path) -> None:
    """Forces one file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(directory: Path) -> Iterator[Path]:
    for root, directories, names in os.walk(directory):
        directories.sort()
        for name in sorted(names):
            yield Path(root) / name


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode()).hexdigest()
