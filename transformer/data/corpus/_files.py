"""The files of a corpus: find them by pattern, cut them into shards, and read their documents one after the other."""

from __future__ import annotations

import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transformer.config._checks import nearest
from transformer.data.corpus import _tables as tables
from transformer.data.files._texts import decode_utf8, unix_lines
from transformer.data.tokenizers._base import utf8

TEXT, JSON_LINES, PARQUET, ARROW = ".txt", ".jsonl", ".parquet", ".arrow"
EXTENSIONS = TEXT, JSON_LINES, PARQUET, ARROW
TFDS = "tfds:"
"""prefix of the name of a TFDS dataset"""
LONGEST = 2**18
"""bytes of a .txt file after which the next line begins another document"""
LEAST_SHARD = 2**24
"""smallest shard, in bytes of text"""
MOST_SHARDS = 128
"""number of shards of a source, from which on they become larger: each is an open file of the training process"""
_BLOCK = 2**20


@dataclass(frozen=True)
class Segment:
    """A part of a file: bytes of a text file, row groups, record batches, or records."""

    path: str
    """path of the file"""
    format: str
    """one of `EXTENSIONS`, or `TFDS`"""
    start: int
    """first byte, row group, record batch or record"""
    end: int
    """one past the last"""
    size: int
    """bytes of text, exact for text files"""


@dataclass(frozen=True)
class Source:
    """The files of one pattern."""

    pattern: str
    files: tuple[tuple[str, int, int], ...]
    """path, size and modification time of each file"""
    segments: tuple[Segment, ...]
    """the files in order, cut into parts of at most the size of a shard where their format allows it"""

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(segment.size for segment in self.segments)

    def shards(self) -> list[list[Segment]]:
        """Return the segments of each shard. They depend on the files only."""
        limit, shards, filled = shard_size(self.size), [], 0
        for segment in self.segments:
            if not shards or filled + segment.size > limit:
                shards.append([])
                filled = 0
            shards[-1].append(segment)
            filled += segment.size
        return shards


def find_source(pattern: str, field: str, data_dir: str | None) -> Source:
    """Find the files of a glob pattern, `tfds:NAME` or `tfds:NAME@SPLIT`, and check what needs no reading of them.

    Raises FileNotFoundError if there are none, and ValueError for another format, no such field, or empty files.
    """
    if pattern.startswith(TFDS):
        parts = tables.tfds_parts(pattern.removeprefix(TFDS), field, data_dir)
        paths = sorted({path for path, *_ in parts})
        size = shard_size(sum(part[-1] for part in parts))
        segments = [Segment(path, TFDS, *one) for path, *part in parts for one in _cut_rows(*part, size)]
    else:
        paths = _matching(pattern)
        segments = _segments(paths, field)
    if not sum(segment.size for segment in segments):
        raise ValueError(f"{pattern} is empty: expected text, got {len(paths)} files without any. Add text.")
    files = tuple((path, (found := os.stat(path)).st_size, found.st_mtime_ns) for path in paths)
    return Source(pattern, files, tuple(segments))


def _segments(paths: list[str], field: str) -> list[Segment]:
    """Return the segments of files, after a look at their columns or first lines."""
    extensions = {path: os.path.splitext(path)[1] for path in paths}
    units = {path: tables.unit_sizes(path, field) for path in paths if extensions[path] in (PARQUET, ARROW)}
    whole = {path: sum(units[path]) if path in units else os.path.getsize(path) for path in paths}
    size, segments = shard_size(sum(whole.values())), []
    for path, extension in extensions.items():
        if path in units:
            segments += [Segment(path, extension, i, i + 1, n) for i, n in enumerate(units[path])]
            continue
        if extension == JSON_LINES:
            next(_json_lines(Segment(path, JSON_LINES, 0, 1, 1), field), None)  # the first line has the field
        segments += [
            Segment(path, extension, start, min(start + size, whole[path]), min(size, whole[path] - start))
            for start in range(0, whole[path], size)
        ]
    return segments


def shard_size(size: int) -> int:
    """Return the number of bytes of text in a shard of a source with `size` bytes."""
    return max(LEAST_SHARD, -(-size // MOST_SHARDS))


def shared_file(sources: Iterable[Source], others: Iterable[Source]) -> str | None:
    """Return the path of a file of which both have the same part; None if there is none."""
    parts: dict[str, list[Segment]] = {}
    for source in sources:
        for segment in source.segments:
            parts.setdefault(segment.path, []).append(segment)
    for source in others:
        for one in source.segments:
            if any(one.start < part.end and part.start < one.end for part in parts.get(one.path, ())):
                return one.path
    return None


def read_documents(segments: Iterable[Segment], field: str) -> Iterator[str]:
    """Yield the documents of segments in order; empty ones are skipped.

    A .txt file is one document; after `LONGEST` bytes, the next line begins another one.
    """
    for segment in segments:
        if segment.format == TEXT:
            found = _texts(segment)
        elif segment.format == JSON_LINES:
            found = _json_lines(segment, field)
        elif segment.format == TFDS:
            found = tables.tfds_texts(segment.path, segment.start, segment.end, field)
        else:
            found = tables.table_texts(segment.path, segment.start, segment.end, field)
        for text in found:
            if text.strip():
                yield unix_lines(text)


def _cut_rows(start: int, end: int, size: int, most: int) -> list[tuple[int, int, int]]:
    """Cut a range of rows of about equal sizes into parts of at most about `most` bytes: (start, end, bytes)."""
    count = min(end - start, max(1, -(-size // most)))
    edges = [start + (end - start) * i // count for i in range(count + 1)]
    return [(a, b, size * (b - a) // (end - start)) for a, b in itertools.pairwise(edges)]


def _matching(pattern: str) -> list[str]:
    """Return the absolute paths of the files that match, sorted."""
    expanded = os.path.expanduser(pattern)
    found = sorted(glob.glob(expanded, recursive=True))
    paths = [os.path.abspath(path) for path in found if os.path.isfile(path)]
    if not paths:
        if found:
            raise FileNotFoundError(
                f"{pattern} matches only folders, such as {found[0]}. Pass a pattern of files, such as "
                f"'{found[0]}/**/*.jsonl'."
            )
        folder = Path(expanded).parent
        siblings = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        where = f" The folder {folder} has {len(siblings)} entries." if folder.is_dir() else f" No folder {folder}."
        raise FileNotFoundError(
            f"no file matches {pattern}.{nearest(Path(pattern).name, siblings)}{where} Check --data.paths; put a "
            "pattern in quotation marks."
        )
    for path in paths:
        if os.path.splitext(path)[1] not in EXTENSIONS:
            raise ValueError(
                f"{path} has an unknown extension: expected one of {', '.join(EXTENSIONS)} (not compressed). Convert "
                f"the file, or use a narrower pattern than {pattern}."
            )
    return paths


def _aligned(file: BinaryIO, place: int) -> int:
    """Return the first line start at or after `place`."""
    if place == 0:
        return 0
    file.seek(place - 1)
    while block := file.read(_BLOCK):
        if (found := block.find(b"\n")) >= 0:
            return file.tell() - len(block) + found + 1
    return file.tell()


def _texts(segment: Segment) -> Iterator[str]:
    """Yield the documents that begin in a part of a text file."""
    with open(segment.path, "rb") as file:
        start, end = _aligned(file, segment.start), _aligned(file, segment.end)
        while start < end:
            file.seek(start)
            part = file.read(min(LONGEST, end - start))
            if start + len(part) < end:
                part += file.readline(LONGEST)
                while start + len(part) < end and (byte := file.read(1)) and byte[0] & 0xC0 == 0x80:
                    part += byte  # without a line end: don't cut a character
            if not part:
                return
            yield decode_utf8(part, segment.path, start)
            start += len(part)


def _json_lines(segment: Segment, field: str) -> Iterator[str]:
    """Yield the texts of the lines that begin in a part of a file of JSON lines."""
    with open(segment.path, "rb") as file:
        place, end = _aligned(file, segment.start), _aligned(file, segment.end)
        file.seek(place)
        while place < end and (line := file.readline()):
            start, place = place, place + len(line)
            text = decode_utf8(line, segment.path, start)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                problem = f"expected a JSON object, got {text[:40]!r} ({error})."
            else:
                problem = _problem(record, field)
            if problem:
                raise ValueError(f"{segment.path}, line {_line_number(segment.path, start)}: {problem}")
            if record[field] is not None:
                yield record[field]


def _problem(record: object, field: str) -> str:
    """Return what is wrong with a row; "" if nothing is."""
    if not isinstance(record, dict):
        return f"expected a JSON object, got {type(record).__name__}."
    remedy = "Set the field that contains the text (--data.text-field)."
    if field not in record:
        fields = ", ".join(record) or "none"
        return f"expected text in field {field!r}, got fields {fields:.200}.{nearest(field, record)} {remedy}"
    if record[field] is None:
        return ""
    if not isinstance(record[field], str):
        return f"expected text in field {field!r}, got {type(record[field]).__name__}. {remedy}"
    try:
        utf8(record[field])
    except ValueError as error:
        return str(error)
    return ""


def _line_number(path: str, place: int) -> int:
    """Return the number of the line that starts at a byte of a file, counted from 1."""
    lines = 1
    with open(path, "rb") as file:
        while place > 0 and (block := file.read(min(_BLOCK, place))):
            lines += block.count(b"\n")
            place -= len(block)
    return lines
