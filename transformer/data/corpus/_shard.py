"""Tokenize one shard: two streams of tokens, one per split, each in an array_record file and an index of documents."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from transformer.data.corpus._files import Segment, read_documents
from transformer.data.tokenizers._base import Tokenizer, utf8
from transformer.data.tokenizers._bpe import BPETokenizer
from transformer.data.tokenizers._kinds import load_tokenizer
from transformer.data.tokenizers._word_cache import WordCache

BLOCK = 8192
"""tokens of a record"""
SPLITS = "train", "validation"
Made = TypeVar("Made")
_AT_ONCE = 2**18
"""characters that are encoded at once"""


@dataclass(frozen=True)
class ShardJob:
    """What a process needs to tokenize a shard."""

    folder: Path
    """the cache of the source, with the tokenizer"""
    number: int
    segments: tuple[Segment, ...]
    field: str
    """field or column with the text"""
    held_out: float
    """share of the documents for validation"""

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True)
class Facts:
    """Manifest of one split of a shard."""

    tokens: int
    documents: int
    sha256: str
    """hash of the tokens and of the ends of the documents"""
    files: dict[str, int]
    """names and sizes of the files"""


def token_type(vocab_size: int) -> np.dtype:
    """Return the type of stored tokens, little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def held_out(text: str, share: float) -> bool:
    """Return whether a document belongs to the validation split.

    This depends on its text only: equal documents are in the same split, and changes of other files move nothing.
    """
    number = int.from_bytes(hashlib.blake2b(utf8(text), digest_size=8).digest(), "little")
    return number < share * 2**64


def tokenize_shard(job: ShardJob) -> None:
    """Tokenize a shard, and write its manifest when all its files are on disk."""
    tokenizer = _tokenizer(str(job.folder / "tokenizer"))
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    streams = {
        split: _Stream(job.folder, f"{job.number:05d}.{split}", token_type(tokenizer.vocab_size)) for split in SPLITS
    }
    for texts in _batches(read_documents(job.segments, job.field)):
        for text, ids in zip(texts, _encoded(str(job.folder / "tokenizer"), texts, job), strict=True):
            streams[SPLITS[held_out(text, job.held_out)]].add(ids, end)
    manifest = {split: asdict(stream.close()) for split, stream in streams.items()}
    partial = job.folder / f"{job.number:05d}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(job.folder / f"{job.number:05d}.json")


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    return load_tokenizer(folder)


@functools.lru_cache(maxsize=1)
def _encoder(folder: str) -> Callable[[list[str]], list[Sequence[int]]]:
    """Return a function from texts to their ids; it is kept, with the words that it remembers, for all shards."""
    tokenizer = _tokenizer(folder)
    if isinstance(tokenizer, BPETokenizer):
        words = WordCache(tokenizer)
        return lambda texts: [words.encode(text) for text in texts]
    return tokenizer.encode_all


def _encoded(folder: str, texts: list[str], job: ShardJob) -> list[Sequence[int]]:
    try:
        return _encoder(folder)(texts)
    except ValueError as error:
        places = ", ".join(dict.fromkeys(segment.path for segment in job.segments))
        raise ValueError(f"a document in {places:.200} can't be encoded: {error}") from None


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Stream:
    """Writes documents one after the other into records of `BLOCK` tokens."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype):
        self._folder, self._name, self._dtype = folder, name, dtype
        self._buffer, self._filled = np.empty(BLOCK, dtype), 0
        self._tokens, self._ends, self._records = 0, [], 0
        self._digest, self._writer = hashlib.sha256(), None
        self._path = folder / f"{name}.array_record"

    def add(self, ids: Sequence[int], end: list[int]) -> None:
        """Append a document, and its end token if there is one."""
        values = np.empty(len(ids) + len(end), self._dtype)
        values[: len(ids)], values[len(ids) :] = ids, end
        self._tokens += len(values)
        if len(values):
            self._ends.append(self._tokens)
        while len(values):
            part = values[: BLOCK - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            values = values[len(part) :]
            if self._filled == BLOCK:
                self._write()

    def close(self) -> Facts:
        """Write the rest and the index; return the manifest."""
        from array_record.python.array_record_module import ArrayRecordReader

        if self._filled:
            self._write()
        files: dict[str, int] = {}
        if self._writer is not None:
            self._checked(self._writer.close)
            reader = ArrayRecordReader(str(self._path))
            if reader.num_records() != self._records:
                raise OSError(errno.EIO, f"{self._path} has {reader.num_records()} records, expected {self._records}")
            reader.close()
            ends = self._folder / f"{self._name}.ends.npy"
            index = np.array(self._ends, np.int64)
            np.save(ends, index)
            self._digest.update(index.astype("<i8").tobytes())
            for path in (self._path, ends):
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
                files[path.name] = path.stat().st_size
        return Facts(self._tokens, len(self._ends), self._digest.hexdigest(), files)

    def _write(self) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        if self._writer is None:
            # group_size 1: each record can be read alone.
            self._writer = self._checked(ArrayRecordWriter, str(self._path), "group_size:1,zstd:1")
        record = self._buffer[: self._filled].tobytes()
        self._digest.update(record)
        self._checked(self._writer.write, record)
        self._filled, self._records = 0, self._records + 1

    def _checked(self, function: Callable[..., Made], *arguments: object) -> Made:
        """Call a function of the library, which reports a full disk as a RuntimeError."""
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise OSError(errno.ENOSPC, str(error)) from None
