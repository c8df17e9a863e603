"""Files that the user names for output: one that another program wrote is not overwritten."""

from __future__ import annotations

from pathlib import Path

from transformer.config import ConfigError

MARK = b"transformer-zoo"
"""in the first bytes of every page and picture that this program writes (`viz/`)"""
_READ = 4096


def check_replaceable(path: Path | None, option: str) -> None:
    """Raises ConfigError if the file that `option` names exists and was not written by this program."""
    if path is None or not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        if MARK in file.read(_READ):
            return
    raise ConfigError(
        f"{option} {path} exists and is no page or picture of this program, so it is not overwritten. Name another "
        "file, or delete it."
    )
