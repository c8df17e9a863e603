"""Manifest of a checkpoint: size and SHA-256 of each file. Written last before the commit, verified on every load."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformer.config._replaced_files import replace_file

FORMAT = 1
"""version of the manifest format"""
NAME = "manifest.json"
FIRST = "first_checkpoint.json"
"""file in a workdir that records its first checkpoint; it stays even if all checkpoints are deleted"""


class CheckpointError(ValueError):
    """A checkpoint cannot be used: it is damaged, has another format, or belongs to another model."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped, or an existing directory was renamed."""


def write_manifest(directory: Path, facts: Mapping[str, Any]) -> None:
    """Hash every file under `directory` and write the manifest: `facts` (JSON values) and the list of files."""
    files = {path.relative_to(directory).as_posix(): _entry(path) for path in _files(directory)}
    _store(directory, {"format": FORMAT, **facts, "files": files})


def amend_manifest(directory: Path, manifest: Mapping[str, Any], facts: Mapping[str, Any], files: list[str]) -> None:
    """Replace the manifest atomically by one with updated `facts` and the new `files`, which it did not list before."""
    added = {name: _entry(directory / name) for name in files}
    _store(directory, {**manifest, **facts, "files": {**manifest["files"], **added}})


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint directory. CheckpointError if it is missing, damaged or of another step."""
    path = directory / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_dir() and not any(directory.iterdir()):
            raise CheckpointError(f"{directory} is empty") from None
        raise CheckpointError(
            f"{directory} has no {NAME}: incompletely copied, or not written by this program (expected format {FORMAT})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        content = json.loads(text)
    except ValueError:
        raise CheckpointError(f"{path} is not valid JSON: truncated or damaged") from None
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} was not written by this program (it has no format field, expected {FORMAT})")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']}, expected format {FORMAT}: "
            "use the version of the package that wrote it"
        )
    if content.get("manifest_sha256") != _digest(content):
        raise CheckpointError(f"{path} does not match its own SHA-256: its content was changed")
    if str(content["step"]) != directory.name:
        raise CheckpointError(f"{path} is of step {content['step']}, but its directory is {directory.name}: renamed?")
    return content


def check_sizes(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Check that all files exist and have the right size, without reading them. CheckpointError for the first fault."""
    for name, expected in manifest["files"].items():
        path = directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} is missing ({error.strerror})") from error
        if size != expected["size"]:
            raise CheckpointError(f"{path} has {size} bytes, expected {expected['size']}: truncated or overwritten")


def find_steps(root: Path) -> list[int]:
    """Return the steps in `root`, valid or not, ascending. Temporary and renamed directories do not count."""
    if not root.is_dir():
        return []
    return sorted(
        int(path.name) for path in root.iterdir() if path.name.isdecimal() and path.name == str(int(path.name))
    )


def record_first(workdir: Path, step: int) -> None:
    """Record the first checkpoint of a workdir, if none is recorded yet."""
    if not (workdir / FIRST).exists():
        replace_file(workdir / FIRST, json.dumps({"step": step}) + "\n")


def free_name(first: str) -> Path:
    """Return the first of the paths `first`, `first-2`, `first-3`, ... that does not exist."""
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())


def find_whole(root: Path) -> dict[int, dict[str, Any]]:
    """Return step -> manifest of the checkpoints with a valid manifest and correct file sizes. Files are not hashed."""
    whole = {}
    for step in find_steps(root):
        try:
            manifest = read_manifest(root / str(step))
            check_sizes(root / str(step), manifest)
        except CheckpointError:
            continue
        whole[step] = manifest
    return whole


def ranked(manifests: dict[int, dict[str, Any]], best: str) -> list[int]:
    """Return the steps that have a metric, the best first. Of equal metrics, the newer step comes first."""
    sign = 1 if best == "min" else -1
    scored = [
        (sign * manifest["metric"], -step) for step, manifest in manifests.items() if manifest["metric"] is not None
    ]
    return [-step for _, step in sorted(scored)]


def verified(directory: Path) -> dict[str, Any]:
    """Verify all files of a checkpoint and return its manifest. CheckpointError if it is damaged."""
    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    for name, expected in manifest["files"].items():
        path = directory / name
        try:
            found = _sha256(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if found != expected["sha256"]:
            raise CheckpointError(
                f"{path} has SHA-256 {found[:12]}..., expected {expected['sha256'][:12]}...: its content was changed"
            )
    return manifest


def newest_valid(root: Path, damaged: set[int]) -> tuple[Path, dict[str, Any]] | None:
    """Return directory and manifest of the newest valid checkpoint; None if there are no checkpoints.

    Warns about each newer checkpoint, because it is damaged, and adds its step to `damaged`. CheckpointError if all
    checkpoints are damaged.
    """
    reasons = []
    for step in reversed(find_steps(root)):
        directory = root / str(step)
        try:
            manifest = verified(directory)
        except CheckpointError as error:
            if directory.exists():  # otherwise, a run in progress has just deleted it
                reasons.append(str(error))
                damaged.add(step)
            continue
        for reason in reasons:
            warnings.warn(
                f"Using the checkpoint of step {step}, because a newer one is damaged: {reason}.",
                CheckpointWarning,
                stacklevel=3,
            )
        return directory, manifest
    if reasons:
        listed = "\n  ".join(reasons)
        raise CheckpointError(
            f"No valid checkpoint in {root}:\n  {listed}\n"
            "A run never restarts from step 0 automatically. Restore a valid copy, or pass --restart (in Python: "
            "restart=True) to start a new run, which keeps the files of this run."
        )
    return None


def sync_tree(directory: Path) -> None:
    """Flush every file and directory under `directory` to disk, so that a later rename cannot precede its content."""
    for path in [*_files(directory), *(Path(root) for root, _, _ in os.walk(directory))]:
        sync(path)


def sync(path: Path) -> None:
    """Flush one file or directory to disk (fsync)."""
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


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _store(directory: Path, content: dict[str, Any]) -> None:
    content["manifest_sha256"] = _digest(content)
    new = directory / f"{NAME}.new"
    new.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    sync(new)
    os.replace(new, directory / NAME)
    sync(directory)


def _digest(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode()).hexdigest()
