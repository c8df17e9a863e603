"""Read text files of the user: UTF-8 with or without a byte order mark, with any line endings."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformer.config._checks import nearest
from transformer.config._local_paths import local_path

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""an escape in JSON for one half of a pair of surrogates"""


_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""byte order marks"""
_WITHOUT_MARK = {"UTF-32LE": 0.45, "UTF-32BE": 0.45, "UTF-16LE": 0.3, "UTF-16BE": 0.3}
"""least shares of zero bytes in a text without a byte order mark, most of whose characters are Latin letters"""
_SAMPLE = 4096
"""number of bytes from which the encoding is recognized"""


class SurrogateError(ValueError):
    """A text of a JSON value contains a lone surrogate."""


def missing(place: Path, path: str, what: str = "file") -> FileNotFoundError:
    """Return the error that nothing is at a place, with the most similar name beside it."""
    siblings = [other.name for other in place.parent.iterdir()] if place.parent.is_dir() else []
    return FileNotFoundError(f"no {what} {path}.{nearest(place.name, siblings)} Check the path.")


def read_text(path: str) -> str:
    """Read a whole text file, with all line endings converted to line feeds.

    Raises FileNotFoundError, or ValueError if it is a folder, empty, or not UTF-8 text.
    """
    file = local_path(path, "the file").expanduser()
    if not file.exists():
        raise missing(file, path)
    if not file.is_file():
        raise ValueError(f"{path} is not a file. Pass one text file.")
    content = file.read_bytes()
    text = decode_utf8(content, path)
    if not text.strip():
        raise ValueError(f"{path} is empty: expected text, got {len(content)} bytes without any. Pass another file.")
    return unix_lines(text)


def decode_utf8(content: bytes, path: str, start: int = 0) -> str:
    """Decode a part of a text file that starts at byte `start`, without a byte order mark. Raises ValueError."""
    is_beginning = not start
    if is_beginning:
        if (encoding := _wide_encoding(content)) is not None:
            raise ValueError(
                f"{path} is {encoding}: expected UTF-8. Convert it, for example with `iconv -f {encoding} -t UTF-8`."
            )
        whole, content = len(content), content.removeprefix(b"\xef\xbb\xbf")
        start = whole - len(content)
    if (place := content.find(b"\0")) >= 0:
        line = content.count(b"\n", 0, place) + 1
        where = f"byte {start + place}" + f", in line {line}" * is_beginning
        raise ValueError(
            f"{path} has a NUL byte: expected UTF-8 text, got 0x00 at {where}. Remove the NUL bytes, for example with "
            "`tr -d '\\000'`. If it is a binary file, pass a text file instead."
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where = f"byte {start + error.start} is 0x{content[error.start]:02x}" + is_beginning * f", in line {line}"
        raise ValueError(
            f"{path} is not UTF-8 text: {where}. If it is text in another encoding, convert it, for example with "
            "`iconv -f LATIN1 -t UTF-8`."
        ) from None


def _wide_encoding(content: bytes) -> str | None:
    """Return the encoding of a text in UTF-16 or UTF-32, with or without a byte order mark; None: another one."""
    for mark, name in _MARKS.items():  # the mark of UTF-32 begins with that of UTF-16
        if content.startswith(mark):
            return name
    sample = content[: _SAMPLE - _SAMPLE % 4]
    for name, share in _WITHOUT_MARK.items():
        size = 4 if "32" in name else 2
        if len(content) % size or sample.count(0) < share * len(sample):
            continue
        try:
            text = sample.decode(name)
        except UnicodeDecodeError:
            continue
        if text and "".join(text.split()).isprintable():
            return name
    return None


def unix_lines(text: str) -> str:
    """Convert all line endings to line feeds."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_lines(path: str) -> list[str]:
    """Read the lines of a text file, stripped.

    Other separators of str.splitlines, such as U+2028, don't end a line: line numbers are the same as in other tools.
    """
    return [line.strip() for line in read_text(path).removesuffix("\n").split("\n")]


def read_json_lines(path: str, field: str) -> list[str]:
    """Read the documents of a JSON-lines file; empty lines and empty documents are skipped."""
    documents = []
    for number, record in read_json_objects(path):
        if not isinstance(record.get(field), str):
            got = f"fields {', '.join(record) or 'none'}"
            remedy = f"{nearest(field, record)} Set the field that contains the text (--data.field)."
            if field in record:
                got, remedy = json_type(record[field]), " Correct or remove the line."
            raise ValueError(f"{path}, line {number}: expected text in field {field!r}, got {got}.{remedy}")
        document = unix_lines(record[field])
        if document.strip():
            documents.append(document)
    if not documents:
        raise ValueError(f"{path} is empty: expected documents in field {field!r}, got none with text.")
    return documents


def load_json(text: str) -> Any:
    """Parse JSON, without lone surrogates: their escapes are valid JSON, but not Unicode.

    Raises ValueError, or RecursionError if it is nested too deeply.
    """
    value = json.loads(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            found = error.object[error.start]
            raise SurrogateError(f"a text has the lone surrogate {found!r}, which is not valid Unicode") from None
    return value


def read_json_objects(path: str, formats: str = "") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSON-lines file without empty lines; errors name the formats of the caller."""
    remedy = f"Correct the line, or pass {formats}." if formats else "Correct the line."
    for number, line in enumerate(read_lines(path), 1):
        if not line:
            continue
        try:
            record = load_json(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object, got {line[:40]!r} ({json_reason(error)}). {remedy}"
            ) from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {json_type(record)}. {remedy}")
        yield number, record


def json_type(value: object) -> str:
    """Return the type of a JSON value, for error messages."""
    return "null" if value is None else type(value).__name__


def json_reason(error: Exception) -> str:
    """Return why a line is not JSON; only errors of its syntax have a text for users."""
    if isinstance(error, json.JSONDecodeError | SurrogateError):
        return str(error)
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def read_pairs(source_path: str, target_path: str | None) -> tuple[list[tuple[str, str]], int]:
    """Read sentence pairs from two files with the same number of lines or, without `target_path`, from one file with
    source, tab, target on each line. Returns them, and the number of lines with an empty side, which are skipped.
    """
    if target_path is None:
        rows = [line.split("\t") for line in _tab_lines(source_path)]
        for number, row in enumerate(rows, 1):
            if len(row) != 2 and row != [""]:
                raise ValueError(
                    f"{source_path}, line {number}: expected source, one tab, target; got {len(row) - 1} tabs in "
                    f"{' | '.join(row)[:60]!r}. Fix the line, or pass two files (--data.target-path)."
                )
        pairs = [(row[0].strip(), row[-1].strip() if len(row) == 2 else "") for row in rows]
    else:
        sources, targets = read_lines(source_path), read_lines(target_path)
        if len(sources) != len(targets):
            raise ValueError(
                f"source and target must have the same number of lines: {source_path} has {len(sources)}, "
                f"{target_path} has {len(targets)}. Line n of one file must be the translation of line n of the other."
            )
        pairs = list(zip(sources, targets, strict=True))
    kept = [pair for pair in pairs if all(pair)]
    if not kept:
        raise ValueError(
            f"{source_path} has no pair with text on both sides ({len(pairs)} lines read). Check the file."
        )
    return kept, len(pairs) - len(kept)


def read_labeled(path: str, text_column: str, label_column: str) -> list[tuple[str, str]]:
    """Read texts and labels from a tab-separated file whose first line names the columns; empty lines are skipped.

    Quotation marks are ordinary characters, as in the files of GLUE.
    """
    header, *rows = (line.split("\t") for line in _tab_lines(path))
    places = []
    for column in (text_column, label_column):
        if column not in header:
            raise ValueError(
                f"{path} has no column {column!r}: its first line has {', '.join(map(repr, header))[:200]}."
                f"{nearest(column, header)} Write the column names on the first line, separated by tabs."
            )
        places.append(header.index(column))
    pairs = []
    for number, row in enumerate(rows, 2):
        if row == [""]:
            continue
        if len(row) != len(header):
            raise ValueError(
                f"{path}, line {number}: expected {len(header)} columns as in the first line, with a {text_column} and "
                f"a {label_column}; got {len(row)}: {' | '.join(row)[:60]!r}. Fix the line."
            )
        if empty := [header[place] for place in places if not row[place].strip()]:
            raise ValueError(
                f"{path}, line {number}: the column {empty[0]!r} is empty: {' | '.join(row)[:60]!r}. Fill it in, or "
                f"remove the line."
            )
        pairs.append(tuple(row[place].strip() for place in places))
    if not pairs:
        raise ValueError(f"{path} has only a first line: expected texts and labels below it.")
    return pairs


def read_table(
    path: str, remedy: str, *, separator: str = ",", strict: bool = False
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Read the column names in the first line of a table, and (line number, cells) of the rows below it.

    A quoted cell may contain a line feed; `strict` refuses wrong quotes. Errors say how to correct a row (`remedy`).
    """
    reader = csv.reader(io.StringIO(read_text(path)), delimiter=separator, strict=strict)
    try:
        (_, header), *rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}. {remedy}") from error
    for number, row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"{path}, line {number}: expected {len(header)} columns as in the first line, got {len(row)}: "
                f"{separator.join(row)[:60]!r}. {remedy}"
            )
    return header, rows


def _tab_lines(path: str) -> list[str]:
    return [line if line.strip() else "" for line in read_text(path).removesuffix("\n").split("\n")]


def cut(count: int, share: float, path: str, what: str, option: str = "--data.validation-path") -> int:
    """Return the index of the first held-out item: the last `share` of the items is held out, and at least one.

    Of fewer than 2 items (`what`, such as "lines"), ValueError suggests a second file with `option`.
    """
    if count < 2:
        raise ValueError(
            f"{path} is too short to hold out a part for evaluation: expected at least 2 {what}, got {count}. Add more "
            f"text, or pass a second file for evaluation ({option})."
        )
    return min(max(int(count * (1 - share)), 1), count - 1)
