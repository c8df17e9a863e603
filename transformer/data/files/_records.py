"""Read records (dicts) from files of the user: JSON lines, Parquet, Arrow, and datasets that `datasets` saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.config._checks import nearest
from transformer.config._untrusted import read_json_object
from transformer.data.files._texts import json_reason, load_json, read_json_objects

HELD_OUT = ("validation", "test")
"""names of the held-out split of a saved `DatasetDict`, the first that exists"""
_FORMATS = "JSON lines (.jsonl), Parquet (.parquet), Arrow (.arrow), or a folder that `save_to_disk` of datasets wrote"


@dataclass(frozen=True)
class Record:
    """One row of a file."""

    place: str
    """file and line or row, for error messages"""
    values: Mapping[str, Any]
    """its columns, without those that are None"""
    nulls: tuple[str, ...] = ()
    """names of its columns that are None"""

    @property
    def columns(self) -> str:
        """The names of all columns, for error messages."""
        return ", ".join([*map(repr, self.values), *(f"{name!r} (null)" for name in self.nulls)])[:100] or "none"


def read_records(path: str, split: str | None = None) -> list[Record]:
    """Read the rows of a file or folder, in order.

    Args:
        path: a file of JSON lines, Parquet or Arrow, by its ending, or a folder that `Dataset.save_to_disk` or
            `DatasetDict.save_to_disk` of the package datasets wrote. Parquet and Arrow need the package pyarrow.
        split: split of a saved `DatasetDict`; None: "train".

    Raises:
        FileNotFoundError: the file or split does not exist.
        ValueError: the content is damaged, or has another format.
        ImportError: pyarrow is not installed.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        rows = _saved_dataset(place, split)
    elif place.suffix in (".parquet", ".arrow"):
        rows = list(_rows(place))
    else:
        rows = [Record(f"{path}, line {number}", record) for number, record in read_json_objects(path, _FORMATS)]
    if not rows:
        raise ValueError(f"{path} is empty: expected at least one row. Add rows.")
    return [_without_nulls(row) for row in rows]


def _without_nulls(row: Record) -> Record:
    """Return a row with its columns that are None in `nulls` alone."""
    nulls = tuple(name for name, value in row.values.items() if value is None)
    return Record(row.place, {name: value for name, value in row.values.items() if name not in nulls}, nulls)


def held_out_split(path: str) -> str | None:
    """Return the name of the held-out split in a saved `DatasetDict`; None if there is none, or for other files."""
    place = Path(path).expanduser()
    if not (place / "dataset_dict.json").is_file():
        return None
    return next((name for name in HELD_OUT if name in _split_names(place)), None)


def _saved_dataset(folder: Path, split: str | None) -> list[Record]:
    """Read a folder written by `save_to_disk`."""
    if (folder / "dataset_dict.json").is_file():
        names = _split_names(folder)
        chosen = split or "train"
        if chosen not in names:
            raise FileNotFoundError(
                f"{folder} has no split {chosen!r}.{nearest(chosen, names)} It has: {', '.join(names)}. Pass the "
                "folder of one of them."
            )
        folder = folder / chosen
    state = _json(folder, "state.json")
    entries = state.get("_data_files")
    listed = entries if isinstance(entries, list) else []
    files = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed]
    if not files or not all(isinstance(name, str) and name and Path(name).name == name for name in files):
        raise ValueError(
            f"_data_files in {folder / 'state.json'} must name files of this folder, got {entries!r:.80}. Save the "
            "dataset again."
        )
    return [row for name in files for row in _rows(folder / name)]


def _split_names(folder: Path) -> list[str]:
    names = _json(folder, "dataset_dict.json").get("splits")
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(
            f"splits in {folder / 'dataset_dict.json'} must be names of folders, got {names!r:.80}. Save the dataset "
            "again."
        )
    return names


def _json(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        raise ValueError(f"{folder} is a folder without {name}: expected {_FORMATS}. Pass one of these.")
    return read_json_object(folder, name, "Save the dataset again.", ValueError)


def _rows(file: Path) -> Iterator[Record]:
    """Yield the rows of a Parquet or Arrow file."""
    check_pyarrow(file)
    import pyarrow
    from pyarrow import parquet

    if not file.is_file():
        raise FileNotFoundError(f"no file {file}. Check the path.")
    with arrow_errors(file):
        # `validate` checks every offset, so that a damaged file can't be read out of bounds.
        if file.suffix == ".parquet":
            table = parquet.ParquetFile(file).read()
        else:
            # From a buffer: of a file, pyarrow would request as many bytes as a damaged length in it says.
            content = file.read_bytes()
            opened = (pyarrow.ipc.open_file if content.startswith(b"ARROW1") else pyarrow.ipc.open_stream)(content)
            table = opened.read_all()
        table.validate(full=True)
        rows = table.to_pylist()
    for number, row in enumerate(rows):
        yield Record(f"{file}, row {number}", {name: without_none(value) for name, value in row.items()})


def check_pyarrow(file: Path) -> None:
    """Raise ImportError, with the command that installs it, if pyarrow is missing."""
    try:
        import pyarrow  # noqa: F401
        from pyarrow import parquet  # noqa: F401
    except ImportError:
        raise ImportError(
            f"reading {file} needs the package pyarrow. Install it: pip install 'transformer-zoo[datasets]'."
        ) from None


@contextlib.contextmanager
def arrow_errors(file: Path) -> Iterator[None]:
    """Convert the errors of pyarrow, which has many kinds, to a ValueError with the name of the file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError, KeyError) as error:
        cause = " ".join(str(error).split())[:200].rstrip(".")
        kind = "Parquet" if file.suffix == ".parquet" else "Arrow"
        raise ValueError(f"{file} is not a readable {kind} file: {cause}. Write it again.") from None


def without_none(value: Any) -> Any:
    """Return nested dicts and lists without the entries that are None, with which Arrow fills up missing fields."""
    if isinstance(value, Mapping):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [without_none(one) for one in value]
    return value


def parsed(record: Record, column: str) -> Any:
    """Return a column; a text in it is parsed as JSON, because files of fixed types store nested values so."""
    value = record.values.get(column)
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{record.place}: {column} must be JSON, got {value!r:.60} ({json_reason(error)}). Correct it."
        ) from None
