"""Split a batch of requests over processes that share a file system, and join their answers."""

from __future__ import annotations

import glob
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from transformer.config._checks import ConfigError
from transformer.serve._batch import Key, answer_lines

Item = TypeVar("Item")

MOST_SHARDS = 100_000
"""maximum number of processes"""


@dataclass(frozen=True)
class Shard:
    """The part of one process: the requests whose index, modulo the number of processes, is its own."""

    index: int
    """index of this process, from 0"""
    count: int
    """number of processes"""

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `index/count`, such as 0/4; raise ConfigError for another form."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        index, count = map(int, found.groups()) if found else (0, 0)
        if not index < count <= MOST_SHARDS:
            raise ConfigError(
                f"--shard must be INDEX/COUNT with an index from 0 to COUNT - 1, and a count of at most {MOST_SHARDS}, "
                f"such as 0/4, got {text!r:.80}. Pass the index of this process and the number of processes."
            )
        return cls(index, count)

    def select(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items of this process."""
        return items[self.index :: self.count]

    def part(self, output: Path) -> Path:
        """Return the file with the answers of this process."""
        return output.with_name(f"{output.name}.shard-{self.index}-of-{self.count}")


def parts(output: Path) -> list[Path]:
    """Return the files of answers that processes have written for an output, also those of another count."""
    return sorted(output.parent.glob(f"{glob.escape(output.name)}.shard-*-of-*"))


def answered(output: Path) -> set[Key]:
    """Return the keys of all answers: those in the output, and those in the files of the processes."""
    return {key for path in _sources(output) for key, _ in answer_lines(path)}


def join_parts(output: Path, keys: Collection[Key]) -> bool:
    """Write the output from the files of all processes and remove them, if each line of the batch (key) has an answer.

    Each process calls this after it has closed its own file, so the last one finds all answers. Two processes that join
    at the same time write the same content, and each replaces the output as a whole. Answers in the output stay.

    Return whether all requests are answered.

    Raises:
        ConfigError: a line of a file is not an answer.
        OSError: a file can't be read or written.
    """
    sources = _sources(output)
    if not answered(output).issuperset(keys):
        return False
    made = sources if sources[:1] != [output] else sources[1:]
    if not made:
        return True  # another process has joined them
    with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}.", delete=False) as file:
        try:
            written: set[Key] = set()
            for path in sources:
                for key, line in answer_lines(path):
                    if key not in written:
                        written.add(key)
                        file.write(line)
            file.flush()
            os.fsync(file.fileno())
            if not written.issuperset(keys):  # another process has joined them, and removed a file meanwhile
                return answered(output).issuperset(keys)
            os.chmod(file.name, made[0].stat().st_mode if made[0].exists() else 0o644)
            os.replace(file.name, output)
        finally:
            Path(file.name).unlink(missing_ok=True)
    for path in made:
        path.unlink(missing_ok=True)
    return True


def _sources(output: Path) -> list[Path]:
    return [path for path in (output, *parts(output)) if path.exists()]
