"""Rows of a tokenized source, read from disk by index: windows of continuous tokens, or packed documents."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer.data._packed_rows import best_fit
from transformer.data.corpus._cache import Tokenized, cache_errors, locked, run_jobs
from transformer.data.corpus._shard import BLOCK, Facts, token_type

_PACKED_AT_ONCE = 2**14
"""sequences that are packed together: more would make rows hardly fuller, and packing slower"""


class Tokens:
    """The tokens of a split (`train` or `validation`) of a source, on disk."""

    def __init__(self, tokenized: Tokenized, split: str, vocab_size: int):
        self.folder, self.split = tokenized.folder, split
        self.facts: list[Facts] = [shard[split] for shard in tokenized.shards]
        self._type = token_type(vocab_size)
        records = [-(-facts.tokens // BLOCK) for facts in self.facts]
        self._first = np.cumsum([0, *records])
        self._paths = [self.folder / f"{n:05d}.{split}.array_record" for n in range(len(records))]
        self._source = None
        if self._first[-1]:
            from grain.sources import ArrayRecordDataSource

            parts = zip(self._paths, records, strict=True)
            # With the number of records, no file is opened before one of its records is read.
            self._source = ArrayRecordDataSource([f"{path}[0:{count}]" for path, count in parts if count])

    @property
    def count(self) -> int:
        return sum(facts.tokens for facts in self.facts)

    @property
    def documents(self) -> int:
        return sum(facts.documents for facts in self.facts)

    def read(self, shard: int, start: int, end: int) -> np.ndarray:
        """Return the tokens from `start` to `end` of a shard. Raises ValueError if the file is damaged."""
        first, last = start // BLOCK, (end - 1) // BLOCK
        try:
            found = [self._source[int(self._first[shard]) + block] for block in range(first, last + 1)]
            tokens = np.concatenate([np.frombuffer(record, self._type) for record in found])
            if len(tokens) < end - first * BLOCK:
                raise ValueError(f"expected {end - first * BLOCK} tokens, got {len(tokens)}")
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise ValueError(
                f"the tokenized text in {self._paths[shard]} can't be read: {str(error)[:200]}. Delete this file and "
                "run again: it is tokenized again."
            ) from error
        return tokens[start - first * BLOCK : end - first * BLOCK]

    def ends(self, shard: int) -> np.ndarray:
        """Return the end of each document of a shard, mapped into memory."""
        return _mapped(self.folder / f"{shard:05d}.{self.split}.ends.npy")


class Windows:
    """Windows of `length` + 1 tokens, which overlap by one: each token of a shard but the first is a target once."""

    def __init__(self, tokens: Tokens, length: int):
        self.tokens, self._length = tokens, length
        # The last token of a shard is only a target.
        self._ends = np.cumsum([-(-max(facts.tokens - 1, 0) // length) for facts in tokens.facts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def targets(self) -> int:
        return sum(max(facts.tokens - 1, 0) for facts in self.tokens.facts)

    def __getitem__(self, row: int) -> list[np.ndarray]:
        """Return the window as one sequence of 2 to `length` + 1 tokens."""
        shard, place = _located(self._ends, row)
        start = place * self._length
        return [self.tokens.read(shard, start, min(start + self._length + 1, self.tokens.facts[shard].tokens))]


@dataclass(frozen=True)
class _PackJob:
    """What a process needs to pack the documents of a shard."""

    ends: Path
    """ends of the documents"""
    rows: Path
    """file to write: for each sequence its start and length"""
    row_ends: Path
    """file to write: for each row the end of its sequences"""
    length: int


class PackedDocuments:
    """Rows of whole documents; those that are longer than a row are cut into sequences, as `_packed_rows.chunks` does.

    The plan (which sequences are in which row) is stored next to the tokens, and mapped into memory.
    """

    def __init__(self, tokens: Tokens, length: int):
        self.tokens, self._length = tokens, length
        jobs = {shard: self._job(shard) for shard, facts in enumerate(tokens.facts) if facts.tokens > facts.documents}
        with cache_errors(tokens.folder), locked(tokens.folder, "packs documents"):
            missing = [job for job in jobs.values() if not (job.rows.is_file() and job.row_ends.is_file())]
            if missing:
                sizes = [job.ends.stat().st_size for job in missing]
                run_jobs(_pack, missing, sizes, f"packing {tokens.split} documents")
        self._plans = {shard: (_mapped(job.rows), _mapped(job.row_ends)) for shard, job in jobs.items()}
        plans = [self._plans.get(shard) for shard in range(len(tokens.facts))]
        self._ends = np.cumsum([0 if plan is None else len(plan[1]) for plan in plans])

    def _job(self, shard: int) -> _PackJob:
        kinds = "ends", f"rows-{self._length}", f"ends-{self._length}"
        paths = (self.tokens.folder / f"{shard:05d}.{self.tokens.split}.{kind}.npy" for kind in kinds)
        return _PackJob(*paths, self._length)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def targets(self) -> int:
        """Number of targets of all rows: all tokens but the first of each document."""
        return self.tokens.count - self.tokens.documents

    def __getitem__(self, row: int) -> list[np.ndarray]:
        """Return the sequences of a row, each of 2 to `length` + 1 tokens."""
        shard, place = _located(self._ends, row)
        rows, row_ends = self._plans[shard]
        first = int(row_ends[place - 1]) if place else 0
        parts = rows[first : int(row_ends[place])].tolist()
        return [self.tokens.read(shard, start, start + length) for start, length in parts]


def sequences(ends: np.ndarray, length: int) -> np.ndarray:
    """Cut documents into sequences of 2 to `length` + 1 tokens, as `_packed_rows.chunks` does for one document.

    From the ends of the documents in the stream of tokens, returns (start, number of tokens) of each sequence.
    """
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    counts = -(-(ends - starts - 1) // length)  # 0 for a document of one token
    part = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.repeat(starts, counts) + part * length
    return np.stack([start, np.minimum(np.repeat(ends, counts) - start, length + 1)], axis=1)


def _pack(job: _PackJob) -> None:
    """Pack the documents of a shard into rows, and write the plan."""
    parts = sequences(_mapped(job.ends), job.length)
    rows: list[list[int]] = []
    for first in range(0, len(parts), _PACKED_AT_ONCE):
        lengths = (parts[first : first + _PACKED_AT_ONCE, 1] - 1).tolist()
        rows += [[first + item for item in row] for row in sorted(best_fit(lengths, job.length))]
    order = np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(parts))
    _save(job.rows, parts[order])
    _save(job.row_ends, np.cumsum([len(row) for row in rows]))


def _save(path: Path, array: np.ndarray) -> None:
    """Write an array; an interrupted call leaves no file of this name."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, array.astype(np.int64))
    partial.replace(path)


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {str(error)[:200]}. Delete this file and run again.") from error


def _located(ends: np.ndarray, row: int) -> tuple[int, int]:
    """Return the shard of a row, and its index in this shard."""
    shard = int(np.searchsorted(ends, row, side="right"))
    return shard, int(row) - (int(ends[shard - 1]) if shard else 0)
