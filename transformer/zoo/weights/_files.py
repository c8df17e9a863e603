"""Directories of a checkpoint as Hugging Face's libraries write them, read and written; nothing in them is run.

Only JSON and safetensors are opened, and only what lies in the directory (`config.untrusted`). Every size is checked
before memory is taken for it, and every fault that can be found is told in one message.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from transformer.config._checks import nearest
from transformer.config._untrusted import MAX_JSON_BYTES, parse_json, read_bounded, regular_file
from transformer.zoo.weights._header import DTYPE_NAMES, TensorInfo, WeightsError, check_name, header_bytes, read_header

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 * 2**20
"""bound of config.json"""
MAX_SHARDS = 4096
"""bound of the files that an index names; each is opened. Published checkpoints have up to some hundred"""
SHOWN = 20
"""faults that a message lists"""

# What cannot be opened here, and why.
_PICKLES = "these are Python pickles, and reading a pickle can run any code that is in it"
_OTHER_FORMATS = {
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), _PICKLES),
    **dict.fromkeys((".h5", ".msgpack", ".gguf"), "this format is not read here"),
}
_CONVERT = (
    'Where you trust it, convert it with transformers: AutoModel.from_pretrained("{0}").save_pretrained("{0}-safe", '
    "safe_serialization=True)"
)

Source = np.ndarray | Callable[[], np.ndarray]
"""an array of any shape, or a function that makes it"""


class WeightFiles:
    """An opened directory: `config` (config.json) and `tensors` (all of its tensors by name); no tensor is read yet.

    The tensors are those of model.safetensors, or, without it, of the shards that model.safetensors.index.json names.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        WeightsError: anything that is not as it must be; all faults found.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise FileNotFoundError(f"no directory {directory}. Name one with {CONFIG_FILE} and {WEIGHTS_FILE}.")
        # Not `is_file`: of a directory, a pipe or a broken link in its place `regular_file` tells more.
        if not os.path.lexists(self.directory / CONFIG_FILE):
            raise FileNotFoundError(f"no {CONFIG_FILE} in {directory}. Name the directory of a whole checkpoint.")
        problems: list[str] = []
        self.config = self.tensors = {}
        try:
            self.config = self._json(CONFIG_FILE, dict, MAX_CONFIG_BYTES)
        except ValueError as error:
            problems.append(str(error))
        if os.path.lexists(self.directory / WEIGHTS_FILE):
            self.tensors, found = self._tensors_of(WEIGHTS_FILE)
        elif os.path.lexists(self.directory / INDEX_FILE):
            self.tensors, found = self._tensors_of_shards()
        else:
            found = [self._nothing_to_read()]
        if problems + found:
            raise self._error(*problems, *found)

    def read(self, name: str) -> np.ndarray:
        """One tensor, of any shape, in memory of its own; values are not checked (`first_non_finite` does).

        Its bytes are read from their checked place straight into the array. The library would map the whole file
        instead, whose pages count as memory of the process once touched: reading a model would take it twice.

        Raises:
            WeightsError: no such tensor, or the file is no longer what it was when the directory was opened.
        """
        if name not in self.tensors:
            raise WeightsError(f"{self.directory} has no tensor {name!r}.{nearest(name, self.tensors)}")
        info = self.tensors[name]
        array = np.empty(info.shape, info.dtype)
        raw = array.reshape(-1).view(np.uint8)
        try:
            path = regular_file(self.directory, info.file.name)
        except ValueError as error:
            raise self._error(str(error)) from None
        with path.open("rb") as stream:
            stream.seek(info.offset)
            got = stream.readinto(raw)
        if got != info.nbytes:
            raise self._error(
                f"{info.file.name}, tensor {name!r}: expected {info.nbytes} bytes at byte {info.offset}, got {got}: "
                "it was changed while it was open. Get it anew"
            )
        if info.dtype == np.bool_:  # any byte may be in a file, but only 0 and 1 in an array
            np.not_equal(raw, 0, out=array.reshape(-1))
        return array

    def place(self, filename: str) -> Path | None:
        """The path of an optional file of the directory, None if it is missing. WeightsError: a link that leads out of
        the directory or nowhere, or no regular file.
        """
        if not os.path.lexists(self.directory / filename):
            return None
        try:
            return regular_file(self.directory, filename)
        except ValueError as error:
            raise self._error(str(error)) from None

    def json(self, filename: str, expected: type[dict] | type[list] = dict) -> Any:
        """An optional JSON file of the directory ("1_Pooling/config.json"), a tree of plain values; None if missing.

        `expected` is what it must hold: an object (dict) or, as in modules.json, an array (list). WeightsError if it
        holds something else, is larger than 64 MiB, or is no strict JSON.
        """
        if not os.path.lexists(self.directory / filename):
            return None
        try:
            return self._json(filename, expected, MAX_JSON_BYTES)
        except ValueError as error:
            raise self._error(str(error)) from None

    # The methods below raise ValueError with one fault, for a message that lists all.

    def _json(self, filename: str, expected: type, limit: int) -> Any:
        content = read_bounded(self.directory, filename, limit)
        try:
            value = parse_json(content)
        except ValueError as error:
            raise ValueError(f"{filename} is no valid JSON: {error}") from None
        if not isinstance(value, expected):
            kinds = {dict: "an object", list: "an array"}
            raise ValueError(f"{filename} must hold {kinds[expected]}, got {type(value).__name__}")
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
            return {}, [f"{INDEX_FILE}: weight_map must be an object with file names, got {weight_map!r:.80}"]
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
        for shard, told in sorted(by_shard.items()):
            found, faults = self._tensors_of(shard)
            problems += faults
            for name in sorted(found.keys() & tensors.keys()):
                problems.append(f"tensor {name!r} is in two files, {tensors[name].file.name} and {shard}")
            for name in sorted(name for name in told if name not in found) if not faults else ():
                problems.append(f"tensor {name!r} is not in {shard}, where {INDEX_FILE} has it")
            for name in sorted(name for name in found if name not in weight_map):
                problems.append(f"tensor {name!r} of {shard} is not in {INDEX_FILE}")
            tensors |= found
        return tensors, problems

    def _error(self, *problems: str) -> WeightsError:
        shown = "".join(f"\n- {problem}." for problem in problems[:SHOWN])
        more = f"\n- and {len(problems) - SHOWN} more." if len(problems) > SHOWN else ""
        return WeightsError(f"{self.directory} is no checkpoint that can be read:{shown}{more}")

    def _nothing_to_read(self) -> str:
        """Why there are no weights that can be read, and what to do."""
        names = sorted(entry.name for entry in self.directory.iterdir())
        for suffix, reason in _OTHER_FORMATS.items():
            if other := [name for name in names if name.endswith(suffix)]:
                return f"the weights are in {', '.join(other[:3])}: {reason}. {_CONVERT.format(self.directory)}"
        return f"expected {WEIGHTS_FILE} or {INDEX_FILE}, got {', '.join(names[:10])}. Get the whole checkpoint"


def first_non_finite(array: np.ndarray) -> tuple[int, ...] | None:
    """The place of the first NaN or infinity of an array of any shape; None if all of it is finite, or no floats."""
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
) -> None:
    """Writes config.json and the tensors (arrays of any shape by name) as a directory that `WeightFiles` opens.

    One file, model.safetensors, or shards of at most `max_shard_bytes` bytes (a larger tensor has one of its own) and
    their index, by the names that the transformers library gives them. Of a function the array is made twice, once for
    its dtype and shape and once to be written, so that only one is in memory at a time.

    All is written into `.partial` inside the directory first and then moved, config.json last: what an interrupted
    write leaves does not open.

    Raises:
        WeightsError: the directory holds something already, or a name, dtype or config can't be written.
    """
    directory = Path(directory)
    if directory.is_dir() and any(directory.iterdir()):
        raise WeightsError(
            f"{directory} is not empty: nothing is overwritten. Name a new directory, or empty this one."
        )
    sources, shards = _planned(directory, tensors, max_shard_bytes)
    try:
        content = json.dumps(dict(config), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightsError(f"{directory / CONFIG_FILE}: the config is no JSON: {error}. Give plain values.") from None
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [WEIGHTS_FILE]
    with _moved_when_done(directory) as partial:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(partial / name, shard, sources)
        if count > 1:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = sum(info.nbytes for shard in shards for info in shard.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (partial / CONFIG_FILE).write_text(content, encoding="utf-8")


def _is_shard(name: Any) -> bool:
    """Whether a value of an index is a plain file name, so that it stays in the directory."""
    return (
        isinstance(name, str) and name.endswith(".safetensors") and name.isprintable() and not set(name) & set("/\\:")
    )


def _planned(
    directory: Path, tensors: Mapping[str, Source] | Iterable[tuple[str, Source]], max_shard_bytes: int
) -> tuple[dict[str, Source], list[dict[str, TensorInfo]]]:
    """What is to be written by name, and the tensors of each shard in the order of their data."""
    sources: dict[str, Source] = {}
    problems = []
    shards: list[dict[str, TensorInfo]] = [{}]
    room = max_shard_bytes
    for name, source in tensors.items() if isinstance(tensors, Mapping) else tensors:
        info = _info(name, source, directory)
        if name in sources:
            problems.append(f"tensor {name!r} is there twice")
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
    # Large elements first: data without a hole are aligned then, which readers that map a file rely on.
    return sources, [
        dict(sorted(shard.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))) for shard in shards
    ]


# An array lives no longer than one of these two calls; a variable of a loop would keep it while the next is made.


def _info(name: str, source: Source, directory: Path) -> TensorInfo:
    array = np.asarray(source() if callable(source) else source)
    return TensorInfo(name, array.dtype, array.shape, directory, 0)


def _write_tensor(stream: BinaryIO, info: TensorInfo, source: Source) -> None:
    array = np.asarray(source() if callable(source) else source)
    if (array.dtype, array.shape) != (info.dtype, info.shape):
        raise WeightsError(
            f"tensor {info.name!r}: expected {info.dtype} of shape {info.shape} as at first, got {array.dtype} of "
            f"{array.shape}. Its function must make the same array each time."
        )
    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _write_shard(path: Path, shard: Mapping[str, TensorInfo], sources: Mapping[str, Source]) -> None:
    with path.open("xb") as stream:
        stream.write(header_bytes({name: (info.dtype, info.shape) for name, info in shard.items()}))
        for name, info in shard.items():
            _write_tensor(stream, info, sources[name])
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _moved_when_done(directory: Path) -> Iterator[Path]:
    """A folder whose files move up into `directory` if nothing was raised, config.json last; else nothing is left."""
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / ".partial"
    partial.mkdir()
    try:
        yield partial
        for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_FILE):
            path.rename(directory / path.name)
    finally:
        shutil.rmtree(partial)
        if is_new and not any(directory.iterdir()):
            directory.rmdir()
