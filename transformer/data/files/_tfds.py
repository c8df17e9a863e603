"""Datasets that TFDS has prepared as array_record files, or prepares from a description; no code needs TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer.config._local_paths import local_path

if TYPE_CHECKING:
    from tensorflow_datasets.core.dataset_builder import DatasetBuilder
    from tensorflow_datasets.core.features.feature import FeatureConnector

NAME = r"[A-Za-z0-9_][\w.+-]*(/[A-Za-z0-9_][\w.+-]*)?(:\d+\.\d+\.\d+)?"
"""regular expression of the name of a dataset, optionally with a config and a version: wmt14_translate/de-en:1.0.0"""
_AGAIN = "Delete that folder (the next run prepares it again)"


def data_dir(folder: str | None) -> Path:
    """Return the directory of prepared TFDS data: `folder`, else $TFDS_DATA_DIR, else the default of TFDS."""
    if not folder and (default := os.environ.get("TFDS_DATA_DIR")):
        return local_path(default, "TFDS_DATA_DIR").expanduser()
    return local_path(folder or "~/tensorflow_datasets", "--data.data-dir").expanduser()


@dataclass(frozen=True)
class Download:
    """A source file of a dataset; only a file with this SHA-256 is accepted."""

    url: str
    """download address"""
    size: int
    """size in bytes"""
    sha256: str
    """SHA-256 of the content, hexadecimal"""
    filename: str
    """file name in the folder passed as `manual_dir`"""

    def __str__(self):
        return f"the file {self.filename} ({self.size:,} bytes, SHA-256 {self.sha256}) from {self.url}"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Description of a dataset that TFDS prepares once, stores in the array_record format and reads without TensorFlow.

    The description is plain Python, so that data kinds don't import TFDS.
    """

    name: str
    """name of the dataset, and of its folder in the data directory"""
    description: str
    """one-sentence description, stored with the data"""
    homepage: str | None = None
    """address of the authors' page, stored with the data"""
    features: Callable[[ModuleType], Mapping[str, Any]]
    """module `tensorflow_datasets.features` -> features of a record, by name"""
    examples: Callable[[Mapping[str, Path]], Mapping[str, Iterable[tuple[int | str, Mapping[str, Any]]]]]
    """downloaded files by filename -> (key, record) pairs by split; TFDS orders the records of a split by their keys"""
    downloads: tuple[Download, ...] = ()
    """files to download"""
    variant: str | None = None
    """variant, and name of its subfolder, if the dataset has several"""
    version: str = "1.0.0"
    """version, and name of its subfolder; a new version is prepared again"""

    def records(self, folder: str | None = None, manual_dir: str | None = None) -> dict[str, list[dict]]:
        """Return all records by split; prepare the dataset first if `folder` does not contain it.

        `folder` is the directory of prepared datasets (None: the default of `data_dir`), and `manual_dir` one with the
        source files, for machines without network access (None: download them). Raises FileNotFoundError if a file is
        missing in `manual_dir`, ValueError for unexpected content, and OSError without a network or with a full disk.
        """
        if manual_dir is not None:
            for file in self.downloads:
                check_manual_file(Path(manual_dir).expanduser(), file)
        place = data_dir(folder)
        builder, prepared = self._builder(place)
        if not prepared:
            if self.downloads and manual_dir is None:
                _check_reachable(self.downloads)
            import tensorflow_datasets as tfds

            settings = tfds.download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
            try:
                with _quiet():
                    builder.download_and_prepare(download_config=settings)
            except OSError as error:
                builder, prepared = self._builder(place)
                if not prepared:  # otherwise another process prepared it first
                    raise OSError(
                        f"can't prepare {self.name} in {place}: {error}. Use a writable folder (--data.data-dir)."
                    ) from error
        try:
            return _read(builder)
        except Exception as error:
            raise ValueError(unreadable(builder.data_path, error, _AGAIN)) from error

    def _builder(self, place: Path) -> tuple[DatasetBuilder, bool]:
        """Return the TFDS builder for a data directory, and whether its data is prepared already."""
        import tensorflow_datasets as tfds

        config = None if self.variant is None else tfds.core.BuilderConfig(name=self.variant)
        builder_class = _builder_class(self)
        try:
            with _quiet():
                builder = builder_class(data_dir=place, config=config, file_format="array_record")
                return builder, builder.is_prepared()
        except Exception as error:  # damaged files make TFDS raise any kind of exception
            raise ValueError(unreadable(place / self.name, error, _AGAIN)) from error


def _builder_class(prepared: Prepared) -> type:
    import tensorflow_datasets as tfds

    features = dict(prepared.features(tfds.features))

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = prepared.name
        VERSION = tfds.core.Version(prepared.version)
        url_infos = {  # noqa: RUF012 - a class attribute of TFDS
            file.url: tfds.download.checksums.UrlInfo(
                size=tfds.core.utils.Size(file.size), checksum=file.sha256, filename=file.filename
            )
            for file in prepared.downloads
        }
        _generate_examples = None  # abstract in TFDS; _split_generators returns the examples themselves

        def _info(self) -> tfds.core.DatasetInfo:
            return tfds.core.DatasetInfo(
                builder=self,
                description=prepared.description,
                features=tfds.features.FeaturesDict(features),
                homepage=prepared.homepage,
            )

        def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterable]:
            files = dl_manager.download({file.filename: file.url for file in prepared.downloads})
            return dict(prepared.examples({name: Path(path) for name, path in files.items()}))

    return Builder


def _read(builder: DatasetBuilder) -> dict[str, list[dict]]:
    """Return all records by split.

    Texts and integers are parsed from tf.train.Example directly, in a quarter of the time of decoding by TFDS.
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


def _plain(feature: FeatureConnector) -> str | None:
    """Return the tf.train.Feature field that stores a value of this feature; None if TFDS must decode it."""
    from tensorflow_datasets import features

    if isinstance(feature, features.Text) and feature.shape == ():  # a text feature with an encoder stores ids
        return "bytes_list"
    if isinstance(feature, features.Scalar) and np.issubdtype(feature.np_dtype, np.integer):
        return "int64_list"
    return None


def unreadable(folder: os.PathLike, error: Exception, remedy: str = "Delete that folder and prepare it again") -> str:
    """Return the error message for damaged files."""
    return (
        f"the prepared data in {folder} can't be read: {str(error).strip()[:200]}. {remedy}, or use another one "
        "(--data.data-dir)."
    )


def _check_reachable(downloads: Sequence[Download]) -> None:
    """Raise OSError, with a remedy, if the first file can't be reached, because TFDS would retry for minutes."""
    import requests

    url = downloads[0].url
    try:
        requests.head(url, timeout=20, allow_redirects=True).raise_for_status()
    except requests.RequestException as error:
        listed = "; ".join(map(str, downloads))
        raise OSError(
            f"can't download {url} ({type(error).__name__}). Without network access, put {listed} into a folder and "
            "pass the folder with --data.manual-dir FOLDER."
        ) from error


def check_manual_file(folder: Path, file: Download) -> None:
    """Raise FileNotFoundError if a file is missing in the folder, or ValueError if its content is not as expected."""
    path = folder / file.filename
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}. Put {file} there (--data.manual-dir {folder}).")
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != file.sha256:
        raise ValueError(
            f"{path} is not the expected file: got {len(content):,} bytes, SHA-256 {sha256}. Put {file} there."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence TFDS, which prints to stdout, shows progress bars and logs warnings."""
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


def open_prepared(name: str, folder: str | None) -> tuple[Path, DatasetBuilder]:
    """Return the folder of a prepared dataset, of the newest version if the name has none, and its builder.

    Raises FileNotFoundError if it is not prepared, and ValueError if its files are damaged.
    """
    import tensorflow_datasets as tfds

    place = _prepared_folder(name, folder)
    try:
        # Not tfds.builder(name), because the class of the dataset may import TensorFlow.
        builder = tfds.builder_from_directory(place)
        # Both are read from files at the first access.
        dict(builder.info.features)
        list(builder.info.splits)
    except Exception as error:  # damaged files make TFDS raise errors of any type
        raise ValueError(unreadable(place, error)) from error
    return place, builder


def no_random_access(name: str, folder: str | None, place: Path, file_format: str) -> str:
    """Return the error message for a dataset that is prepared in a format other than array_record."""
    return (
        f"{name} was prepared in {place} as {file_format}, which does not support random access. Delete that folder, "
        f"or use another one (--data.data-dir), and prepare it again. {_how_to_prepare(name, folder)}"
    )


def _prepared_folder(dataset: str, folder: str | None) -> Path:
    """Return the folder of a prepared dataset: the version in the name, or else the newest version."""
    name, _, version = dataset.partition(":")
    root = data_dir(folder)
    place = root / name
    versions = {
        tuple(map(int, path.name.split("."))): path
        for path in place.glob("*.*.*")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.name)
    }
    if not version and versions:
        return versions[max(versions)]
    if version and (place / version).is_dir():
        return place / version
    variants = sorted({f"{name}/{path.parent.name}" for path in place.glob("*/*.*.*") if path.is_dir()})
    others = [f"{name}:{path.name}" for _, path in sorted(versions.items())] or variants
    there = f" Found: {', '.join(others)}." if others else ""
    raise FileNotFoundError(
        f"{dataset} is not prepared in {root} (--data.data-dir; default: $TFDS_DATA_DIR, else "
        f"~/tensorflow_datasets).{there} Prepare it. {_how_to_prepare(dataset, folder)}"
    )


def _how_to_prepare(name: str, folder: str | None) -> str:
    """Return instructions to prepare the dataset, which most TFDS builders can't do without TensorFlow."""
    place = str(data_dir(folder))
    return (
        "Run this once on a machine with TensorFlow (the folder may then be copied): "
        f'python -c "import tensorflow_datasets as tfds; tfds.builder({name!r}, data_dir={place!r}, '
        "file_format='array_record').download_and_prepare()\""
    )
