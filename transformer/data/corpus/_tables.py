"""Texts in files of records: a column of Parquet and Arrow files, and a feature of TFDS datasets, read in blocks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from transformer.config._checks import nearest
from transformer.data.files._records import arrow_errors, check_pyarrow
from transformer.data.files._tfds import NAME, no_random_access, open_prepared, unreadable

if TYPE_CHECKING:
    import pyarrow
    from tensorflow_datasets.core.utils.shard_utils import FileInstruction

_ROWS = 1024
"""rows that are read at once"""


def unit_sizes(path: str, column: str) -> list[int]:
    """Return the bytes of the text column in each row group (Parquet) or of each record batch (Arrow) of a file."""
    check_pyarrow(Path(path))
    if path.endswith(".parquet"):
        from pyarrow import parquet

        with arrow_errors(Path(path)), parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
        _check_column(path, schema, column)
        # The index of a column among the leaves of the schema differs from that among the columns if some are nested.
        leaf = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        return [group.column(leaf).total_uncompressed_size for group in groups]
    with arrow_errors(Path(path)), _opened_arrow(path) as (schema, _):
        pass
    _check_column(path, schema, column)
    with arrow_errors(Path(path)), _opened_arrow(path) as (_, batches):
        return [batch.column(column).nbytes for batch in batches]


def table_texts(path: str, start: int, end: int, column: str) -> Iterator[str]:
    """Yield the texts of a range of row groups or record batches; missing values are skipped."""
    if path.endswith(".parquet"):
        from pyarrow import parquet

        with arrow_errors(Path(path)), parquet.ParquetFile(path, pre_buffer=False) as file:
            groups = range(start, end)
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[column], use_threads=False):
                yield from _values(batch, column)
        return
    with arrow_errors(Path(path)), _opened_arrow(path, start) as (_, batches):
        for _, batch in zip(range(start, end), batches, strict=False):
            for row in range(0, batch.num_rows, _ROWS):
                yield from _values(batch.slice(row, _ROWS), column)


@contextlib.contextmanager
def _opened_arrow(path: str, start: int = 0) -> Iterator[tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]]:
    """Open an Arrow file in the file or the stream format. Yields its schema and its record batches from `start` on.

    Memory is mapped: batches that are not looked into are not read.
    """
    import pyarrow

    with pyarrow.memory_map(path) as mapped:
        if mapped.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(mapped)
            yield file.schema, (file.get_batch(i) for i in range(start, file.num_record_batches))
            return
        mapped.seek(0)
        stream = pyarrow.ipc.open_stream(mapped)
        yield stream.schema, (batch for i, batch in enumerate(stream) if i >= start)


def _values(batch: pyarrow.RecordBatch, column: str) -> list[str]:
    """Return the texts of a record batch. `validate` checks every offset and the encoding of a damaged file."""
    values = batch.column(column)
    values.validate(full=True)
    return [text for text in values.to_pylist() if text is not None]


def _check_column(path: str, schema: pyarrow.Schema, column: str) -> None:
    """Raise ValueError unless a column contains texts."""
    import pyarrow

    if column not in schema.names:
        raise ValueError(
            f"{path} has no column {column!r}: it has {', '.join(schema.names)[:200]}.{nearest(column, schema.names)} "
            "Set the column that contains the text (--data.text-field)."
        )
    kind = schema.field(column).type
    types = pyarrow.types
    plain = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain)):
        raise ValueError(
            f"{path}: expected text in column {column!r}, got {kind}. Set the column that contains the text "
            "(--data.text-field)."
        )


def tfds_parts(named: str, feature: str, data_dir: str | None) -> list[tuple[str, int, int, int]]:
    """Return the file ranges of a split of a TFDS dataset: path, first record, one past the last, and bytes.

    `named` is `NAME` (the split train) or `NAME@SPLIT`, where SPLIT may be a slice.
    """
    name, _, split = named.partition("@")
    split = split or "train"
    if not re.fullmatch(NAME, name):
        raise ValueError(
            f"tfds:{named} must name a TFDS dataset, optionally with a split: expected tfds:NAME or tfds:NAME@SPLIT, "
            f"such as tfds:lm1b@test, got {name!r}. Correct --data.paths."
        )
    import tensorflow_datasets as tfds

    folder, builder = open_prepared(name, data_dir)
    features, splits = builder.info.features, list(builder.info.splits)
    texts = [key for key, one in dict(features).items() if isinstance(one, tfds.features.Text) and one.shape == ()]
    if feature not in texts:
        raise ValueError(
            f"{name} has no text {feature!r}: it has {', '.join(texts) or 'no texts'}.{nearest(feature, texts)} Set "
            f"the feature that contains the text (--data.text-field). (Read in {folder}.)"
        )
    if (known := split.partition("[")[0]) not in splits:
        raise ValueError(
            f"{name} has no split {known!r}: it has {', '.join(splits)}.{nearest(known, splits)} (Read in {folder}.)"
        )
    if (kind := builder.info.file_format.value) != "array_record":
        raise ValueError(no_random_access(name, data_dir, folder, kind))
    try:
        found = builder.info.splits[split].file_instructions
    except ValueError as error:
        raise ValueError(f"tfds:{named}: {split!r} is not a split or a slice, such as train[:99%] ({error}).") from None
    return [(file.filename, file.skip, file.skip + file.take, _bytes(file)) for file in found if file.take]


def _bytes(part: FileInstruction) -> int:
    """Return the bytes of a part of a file, if all its records have the same size."""
    return max(1, Path(part.filename).stat().st_size * part.take // part.examples_in_shard)


def tfds_texts(path: str, start: int, end: int, feature: str) -> Iterator[str]:
    """Yield the texts of a range of records."""
    from grain.sources import ArrayRecordDataSource
    from tensorflow_datasets.proto import tf_example_pb2

    try:
        with ArrayRecordDataSource(f"{path}[{start}:{end}]") as records:
            for record in records:
                values = tf_example_pb2.Example.FromString(record).features.feature[feature].bytes_list.value
                yield values[0].decode("utf-8")
    except Exception as error:  # damaged files raise errors of any type
        raise ValueError(unreadable(Path(path).parent, error)) from error
