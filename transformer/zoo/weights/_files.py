"""Reading and writing of checkpoint directories in the Hugging Face format, without executing code from them.

Only JSON and safetensors files inside the directory are opened (see `config._untrusted`). Every size is checked before
memory is allocated for it. All problems are reported in one message.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from transformer.config._checks import nearest
from transformer.config._local_paths import local_path
from transformer.config._progress import counting
from transformer.config._untrusted import MAX_JSON_BYTES, parse_json, read_bounded, regular_file
from transformer.zoo.weights._header import DTYPE_NAMES, TensorInfo, WeightsError, check_name, header_bytes, read_header

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 * 2**20
"""Maximum size of config.json."""
MAX_SHARDS = 4096
"""Maximum number of files in an index, because each one is opened. Published checkpoints have up to a few hundred."""
SHOWN = 20
"""Maximum number of problems that a message lists."""

# Formats that are not supported, and the reason.
_PICKLES = "these files are Python pickles, and loading a pickle can execute arbitrary code"
_OTHER_FORMATS = {
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), _PICKLES),
    **dict.fromkeys((".h5", ".msgpack", ".gguf"), "this format is not supported"),
}
_AGAIN = "\nDownload the files again, or correct them."
_CONVERT = (
    'If you trust the file, convert it with transformers: AutoModel.from_pretrained("{0}").save_pretrained("{0}-safe", '
    "safe_serialization=True)"
)

Source = np.ndarray | Callable[[], np.ndarray]
"""An array of any shape, or a function that returns it."""


class WeightFiles:
    """A checkpoint directory. Opening it reads only config.json and the headers of the weight files.

    The tensors come from model.safetensors or, if it is missing, from the shards listed in
    model.safetensors.index.json.

    Attributes:
        config: the contents of config.json.
        tensors: description of all tensors by name.

    Raises:
        FileNotFoundError: the directory does not exist or has no config.json.
        WeightsError: the directory is invalid; the message lists all problems.
    """

    config_file: ClassVar[str] = CONFIG_FILE
    weights_file: ClassVar[str] = WEIGHTS_FILE

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def __init__(self, directory: str | os.PathLike):
        self.directory = local_path(directory, "directory")
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"no directory {directory}. Pass a directory with {self.config_file} and {self.weights_file}."
            )
        # Not `is_file`: for a directory, a pipe or a broken link, `regular_file` gives a more specific error.
        if not os.path.lexists(self.directory / self.config_file):
            raise FileNotFoundError(
                f"no {self.config_file} in {directory}. Pass the directory of a complete checkpoint."
            )
        problems, remedy = [], _AGAIN
        self.config = self.tensors = {}
        try:
            self.config = self._json(self.config_file, dict, MAX_CONFIG_BYTES)
        except ValueError as error:
            problems.append(str(error))
        if os.path.lexists(self.directory / self.weights_file):
            self.tensors, found = self._tensors_of(self.weights_file)
        elif os.path.lexists(self.directory / INDEX_FILE):
            self.tensors, found = self._tensors_of_shards()
        else:
            found, remedy = [self._missing_weights()], ""
        if problems + found:
            raise self._error(*problems, *found, remedy=remedy)

    def read(self, name: str) -> np.ndarray:
        """Read one tensor into a new array. Its values are not checked (see `first_non_finite`).

        The bytes are read directly into the array. The safetensors library would map the whole file into memory
        instead. The mapped pages count as memory of the process once they are read, so that loading a model would need
        twice its size.

        Raises:
            WeightsError: there is no such tensor, or the file has changed since the directory was opened.
        """
        info = self._info(name)
        array = np.empty(info.shape, info.dtype)
        raw = array.reshape(-1).view(np.uint8)
        self._read_into(raw, info, info.offset)
        if info.dtype == np.bool_:  # a file may contain any byte, but numpy requires 0 or 1
            np.not_equal(raw, 0, out=array.reshape(-1))
        return array

    def dtype_read(self, name: str) -> np.dtype:
        """Return the dtype of the array that `read` returns.

        For a dequantized tensor, it can represent more values than the dtype in `tensors`, which is the one that such
        weights usually have.
        """
        return self._info(name).dtype

    def _info(self, name: str) -> TensorInfo:
        """Return the description of a tensor."""
        if name not in self.tensors:
            raise WeightsError(f"{self.directory} has no tensor {name!r}.{nearest(name, self.tensors)}")
        return self.tensors[name]

    def _read_into(self, raw: np.ndarray, info: TensorInfo, offset: int) -> None:
        """Read the bytes at `offset` of the file of a tensor into `raw`."""
        try:
            path = regular_file(self.directory, info.file.name)
        except ValueError as error:
            raise self._error(str(error)) from None
        with path.open("rb") as stream:
            stream.seek(offset)
            got = stream.readinto(raw)
        if got != raw.nbytes:
            raise self._error(
                f"{info.file.name}, tensor {info.name!r}: expected {raw.nbytes} bytes at byte {offset}, got {got}: "
                "the file changed while it was open"
            )

    def place(self, filename: str) -> Path | None:
        """Return the path of an optional file of the directory, or None if it is missing.

        Raises:
            WeightsError: not a regular file, or a link that is broken or leads outside the directory.
        """
        if not os.path.lexists(self.directory / filename):
            return None
        try:
            return regular_file(self.directory, filename)
        except ValueError as error:
            raise self._error(str(error)) from None

    def json(self, filename: str, expected: type[dict] | type[list] = dict) -> Any:
        """Return the contents of an optional JSON file, or None if it is missing.

        Args:
            filename: path within the directory, such as "1_Pooling/config.json".
            expected: required type: an object (dict) or an array (list).

        Raises:
            WeightsError: the file has another type, is larger than 64 MiB, or is not strict JSON.
        """
        if not os.path.lexists(self.directory / filename):
            return None
        try:
            return self._json(filename, expected, MAX_JSON_BYTES)
        except ValueError as error:
            raise self._error(str(error)) from None

    # The methods below raise ValueError with one problem, or return problems, which `__init__` combines.

    def _json(self, filename: str, expected: type, limit: int) -> Any:
        content = read_bounded(self.directory, filename, limit)
        try:
            value = parse_json(content)
        except ValueError as error:
            raise ValueError(f"{filename} is not valid JSON: {error}") from None
        if not isinstance(value, expected):
            kinds = {dict: "an object", list: "an array"}
            raise ValueError(f"{filename} must contain {kinds[expected]}, got {type(value).__name__}")
        return value

    def _tensors_of(self, filename: str) -> tuple[dict[str, TensorInfo], list[str]]:
        try:
            tensors, problems = read_header(regular_file(self.directory, filename))
        except ValueError as error:
            return {}, [str(error)]
        return tensors, [f"{filename}: {problem}" for problem in problems]

    def _tensors_of_shards(self) -> tuple[dict[str, TensorInfo], list[str]]:
        try:
            weight_map = self._json(INDEX_FILE, dict, MAX_JSON_BYTES).get("weight_map")
        except ValueError as error:
            return {}, [str(error)]
        if not isinstance(weight_map, dict) or not weight_map:
            return {}, [f"{INDEX_FILE}: weight_map must be a non-empty object with file names, got {weight_map!r:.80}"]
        wrong = [
            f"{INDEX_FILE}: tensor {name!r:.80} must be in a .safetensors file of the directory, got {shard!r:.80}"
            for name, shard in weight_map.items()
            if not _is_shard(shard)
        ]
        if wrong:
            return {}, wrong
        if (count := len(set(weight_map.values()))) > MAX_SHARDS:
            return {}, [f"{INDEX_FILE}: expected at most {MAX_SHARDS:,} files, got {count:,}"]
        tensors: dict[str, TensorInfo] = {}
        problems = []
        by_shard: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            by_shard.setdefault(shard, []).append(name)
        for shard, listed in sorted(by_shard.items()):
            found, faults = self._tensors_of(shard)
            problems += faults
            for name in sorted(found.keys() & tensors.keys()):
                problems.append(f"tensor {name!r} is in two files, {tensors[name].file.name} and {shard}")
            for name in sorted(name for name in listed if name not in found) if not faults else ():
                problems.append(f"tensor {name!r} is not in {shard}, although {INDEX_FILE} lists it there")
            for name in sorted(name for name in found if name not in weight_map):
                problems.append(f"tensor {name!r} of {shard} is not listed in {INDEX_FILE}")
            tensors |= found
        return tensors, problems

    def _error(self, *problems: str, remedy: str = _AGAIN) -> WeightsError:
        shown = "".join(f"\n- {problem}." for problem in problems[:SHOWN])
        more = f"\n- and {len(problems) - SHOWN} more." if len(problems) > SHOWN else ""
        return WeightsError(f"{self.directory} is not a valid checkpoint:{shown}{more}{remedy}")

    def _missing_weights(self) -> str:
        """Explain why there are no supported weights, and what to do."""
        names = sorted(entry.name for entry in self.directory.iterdir())
        for suffix, reason in _OTHER_FORMATS.items():
            if other := [name for name in names if name.endswith(suffix)]:
                return f"the weights are in {', '.join(other[:3])}: {reason}. {_CONVERT.format(self.directory)}"
        expected = f"{self.weights_file} or {INDEX_FILE}"
        return f"expected {expected}, got {', '.join(names[:10])}. Download the complete checkpoint"


class AdapterFiles(WeightFiles):
    """A directory with an adapter, as PEFT writes it: adapter_config.json and adapter_model.safetensors."""

    config_file = "adapter_config.json"
    weights_file = "adapter_model.safetensors"


def first_non_finite(array: np.ndarray) -> tuple[int, ...] | None:
    """Return the index of the first NaN or infinity, or None if all elements are finite or not floating-point."""
    if not array.size or array.dtype.kind in "biu":
        return None
    finite = np.isfinite(array)
    return None if finite.all() else tuple(int(i) for i in np.unravel_index(finite.argmin(), array.shape))


def write_weights(
    directory: str | os.PathLike,
    config: Mapping[str, Any],
    tensors: Mapping[str, Source] | Iterable[tuple[str, Source]],
    *,
    max_shard_bytes: int = 5 * 2**30,
    kind: type[WeightFiles] = WeightFiles,
) -> None:
    """Write config.json and the tensors as a directory that `WeightFiles` can open.

    The tensors are written to model.safetensors, or to shards of at most `max_shard_bytes` bytes and an index, with the
    file names of the transformers library. A tensor that is larger than that gets its own shard.

    Everything is written to `.partial` inside the directory and then moved, config.json last. A directory left by an
    interrupted write therefore can't be opened.

    Args:
        directory: new or empty directory.
        config: contents of config.json.
        tensors: arrays by name, or functions that return them. A function is called twice, first for the dtype and
            shape and then for the data, so that only one array is in memory at a time.
        max_shard_bytes: maximum size of the tensors in a file.
        kind: class that can open the directory; it has the file names.

    Raises:
        WeightsError: the directory is not empty, or a name, dtype or the config can't be written.
    """
    directory = local_path(directory, "directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise WeightsError(
            f"{directory} is not empty, and files are never overwritten. Pass a new directory, or empty this one."
        )
    sources, shards = _planned(directory, tensors, max_shard_bytes)
    try:
        content = json.dumps(dict(config), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{directory / kind.config_file}: the config is not valid JSON: {error}. Use plain values."
        ) from None
    count = len(shards)
    names = (
        [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [kind.weights_file]
    )
    add = counting("tensors", len(sources))
    with _moved_when_done(directory, kind.config_file) as partial:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(partial / name, shard, sources, add)
        if count > 1:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = sum(info.nbytes for shard in shards for info in shard.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (partial / kind.config_file).write_text(content, encoding="utf-8")


def _is_shard(name: object) -> bool:
    """Return whether a value of an index is a plain file name, so that it can't lead outside the directory."""
    return (
        isinstance(name, str) and name.endswith(".safetensors") and name.isprintable() and not set(name) & set("/\\:")
    )


def _planned(
    directory: Path, tensors: Mapping[str, Source] | Iterable[tuple[str, Source]], max_shard_bytes: int
) -> tuple[dict[str, Source], list[dict[str, TensorInfo]]]:
    """Return the sources by name, and the tensors of each shard in the order in which they are written."""
    sources: dict[str, Source] = {}
    problems = []
    shards: list[dict[str, TensorInfo]] = [{}]
    room = max_shard_bytes
    for name, source in tensors.items() if isinstance(tensors, Mapping) else tensors:
        info = _info(name, source, directory)
        if name in sources:
            problems.append(f"tensor {name!r} appears twice")
        if info.dtype not in DTYPE_NAMES:
            problems.append(
                f"tensor {name!r}: dtype must be one of {', '.join(map(str, DTYPE_NAMES))}, got {info.dtype}"
            )
        try:
            check_name(name)
        except ValueError as error:
            problems.append(str(error))
        sources[name] = source
        if shards[-1] and info.nbytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = info
        room -= info.nbytes
    if problems:
        raise WeightsError(f"{directory} can't be written: {'; '.join(problems[:SHOWN])}.")
    # Sort by element size, largest first. The data have no gaps, so this aligns all tensors, as readers that map the
    # file expect.
    return sources, [
        dict(sorted(shard.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))) for shard in shards
    ]


# Each of these two functions holds one array and releases it when it returns. A variable in a loop would keep the array
# alive while the next one is created.


def _info(name: str, source: Source, directory: Path) -> TensorInfo:
    array = np.asarray(source() if callable(source) else source)
    return TensorInfo(name, array.dtype, array.shape, directory, 0)


def _write_tensor(stream: BinaryIO, info: TensorInfo, source: Source) -> None:
    array = np.asarray(source() if callable(source) else source)
    if (array.dtype, array.shape) != (info.dtype, info.shape):
        raise WeightsError(
            f"tensor {info.name!r}: expected {info.dtype} of shape {info.shape} as in the first call, got "
            f"{array.dtype} of {array.shape}. The function must return the same array each time."
        )
    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _write_shard(
    path: Path, shard: Mapping[str, TensorInfo], sources: Mapping[str, Source], add: Callable[[float], None]
) -> None:
    with path.open("xb") as stream:
        stream.write(header_bytes({name: (info.dtype, info.shape) for name, info in shard.items()}))
        for name, info in shard.items():
            _write_tensor(stream, info, sources[name])
            add(1)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _moved_when_done(directory: Path, last: str) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved into `directory` on success (`last` at the end) or deleted."""
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / ".partial"
    partial.mkdir()
    try:
        yield partial
        for path in sorted(partial.iterdir(), key=lambda path: path.name == last):
            path.rename(directory / path.name)
    finally:
        shutil.rmtree(partial)
        if is_new and not any(directory.iterdir()):
            directory.rmdir()
