"""Data that TFDS prepares and keeps, and what to say where it can't."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np


def cut(count: int, share: float, path: str, what: str, option: str = "--data.validation-path") -> int:
    """Where the held-out end begins; both parts have something in them. ValueError for less than 2 in all, which names
    the `option` for a second file.
    """
    if count < 2:
        raise ValueError(
            f"{path} has too little to hold some out: expected at least 2 {what}, got {count}. Give more text, or a "
            f"second file to evaluate on ({option})."
        )
    return min(max(int(count * (1 - share)), 1), count - 1)


def data_dir(folder: str | None) -> Path:
    """Where TFDS keeps prepared data."""
    return Path(folder or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def records(
    builder_class: Any,
    folder: str | None,
    variant: Any = None,
    downloads: Mapping[str, Any] = MappingProxyType({}),
    manual_dir: str | None = None,
) -> dict[str, list[dict]]:
    """All records by split, prepared first where they are not, in `folder` (see `data_dir`).

    `downloads` are the files that preparing needs, their `UrlInfo` by address; `manual_dir` is a folder that has them.
    FileNotFoundError, ValueError for files that are not what they should be, OSError where there is no network or room.
    """
    import tensorflow_datasets as tfds

    if manual_dir is not None:
        for url, file in downloads.items():
            check_manual_file(Path(manual_dir).expanduser(), url, file)
    place = data_dir(folder)

    def there() -> tuple[Any, bool]:
        try:
            with _quiet():
                builder = builder_class(data_dir=place, config=variant, file_format="array_record")
                return builder, builder.is_prepared()
        except Exception as error:  # TFDS reads what is there with whatever its files raise
            raise ValueError(_unreadable(place / builder_class.name, error)) from error

    builder, prepared = there()
    if not prepared:
        if downloads and manual_dir is None:
            _check_reachable(downloads)
        settings = tfds.download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
        try:
            with _quiet():
                builder.download_and_prepare(download_config=settings)
        except OSError as error:
            builder, prepared = there()
            if not prepared:  # else another process of the run, or another run, was done first
                raise OSError(
                    f"can't prepare {builder.name} in {place}: {error}. Name a folder that can be "
                    "written (--data.data-dir)."
                ) from error
    try:
        return _read(builder)
    except Exception as error:
        raise ValueError(_unreadable(builder.data_path, error)) from error


def _read(builder: Any) -> dict[str, list[dict]]:
    """All records by split. TFDS decodes every kind of feature; where all are texts and whole numbers they are taken as
    they lie in its tf.train.Example, in a quarter of the time.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.proto import tf_example_pb2

    kinds = {name: _plain(feature) for name, feature in builder.info.features.items()}
    how = tfds.decode.DeserializeMethod
    decoded = None in kinds.values()
    sources = builder.as_data_source(deserialize_method=how.DESERIALIZE_AND_DECODE if decoded else how.RAW_BYTES)
    found = {split: source.__getitems__(list(range(len(source)))) for split, source in sources.items()}
    if decoded:
        return found

    def record(raw: bytes) -> dict:
        values = tf_example_pb2.Example.FromString(raw).features.feature
        return {name: getattr(values[name], kind).value[0] for name, kind in kinds.items()}

    return {split: list(map(record, rows)) for split, rows in found.items()}


def _plain(feature: Any) -> str | None:
    """The list of a tf.train.Example that holds one value of this feature as it is; None where it takes decoding."""
    from tensorflow_datasets import features

    if isinstance(feature, features.Text) and feature.shape == ():  # one with an encoder of its own has ids
        return "bytes_list"
    if isinstance(feature, features.Scalar) and np.issubdtype(feature.np_dtype, np.integer):
        return "int64_list"
    return None


def _unreadable(place: os.PathLike, error: Exception) -> str:
    return (
        f"the prepared data in {place} can't be read: {str(error).strip()[:200]}. Delete that folder (the next run "
        "prepares it anew), or name another one (--data.data-dir)."
    )


def _where_to_put(url: str, file: Any) -> str:
    return f"the file {file.filename} ({int(file.size):,} bytes, SHA-256 {file.checksum}) from {url}"


def _check_reachable(downloads: Mapping[str, Any]) -> None:
    """TFDS retries for minutes where there is no network: ask once, and say what to do."""
    import requests

    url = next(iter(downloads))
    try:
        requests.head(url, timeout=20, allow_redirects=True).raise_for_status()
    except requests.RequestException as error:
        listed = "; ".join(_where_to_put(*item) for item in downloads.items())
        raise OSError(
            f"can't download {url} ({type(error).__name__}). Without network: put {listed} into a folder of your "
            "choice and name the folder with --data.manual-dir FOLDER."
        ) from error


def check_manual_file(folder: Path, url: str, file: Any) -> None:
    """Raises FileNotFoundError or ValueError where the folder has not that file."""
    path = folder / file.filename
    wanted = _where_to_put(url, file)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}. Put {wanted} there (--data.manual-dir {folder}).")
    content = path.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != file.checksum:
        raise ValueError(
            f"{path} is not the file expected: got {len(content):,} bytes, SHA-256 {checksum}. Put {wanted} there."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """TFDS prints to stdout, draws bars and warns about every configuration: none of it belongs into our output."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
