"""Fuzz tests of safetensors headers, index files and directories: they are read, or rejected with WeightsError."""

import json
import math
import os
import struct
from pathlib import Path

from fuzz_parts import BYTE_EDITS, JSON_EDITS, ODD, Fuzz, cleared, damaged, files_of, fuzz, rewritten, written
from hypothesis import strategies as st

from transformer.zoo.weights._files import WeightFiles, WeightsError

__all__ = ["fuzz"]  # a fixture


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ONE = {"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [5], 24, 34)}
HEADERS = [
    ONE,
    {"x": entry("I64", [], 0, 8), "flags": entry("BOOL", [3], 8, 11), "none": entry("F32", [0, 2**40], 11, 11)},
    {f"h.{i}.w": entry("F8_E4M3", [7], 7 * i, 7 * i + 7) for i in range(9)},
    {},
]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 2**16, 2**31, 2**32, 2**62, 2**63, 10**30]), max_size=5)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F64", "f32", "", "F32\0"]) | ODD,
        "shape": SHAPES | ODD,
        "data_offsets": st.lists(st.sampled_from([0, 4, 8, 24, 34, -1, 2**63, 2**64, 10**18]), max_size=3) | ODD,
    }
)
SIZES = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8, "BOOL": 1, "F8_E5M2": 1}


def side_by_side(parts: list[tuple[str, str, list[int]]]) -> dict:
    """Return a valid header with contiguous tensors of these names, dtypes and shapes."""
    header, place = {}, 0
    for name, dtype, shape in parts:
        end = place + math.prod(shape) * SIZES[dtype]
        header[name] = entry(dtype, shape, place, end)
        place = end
    return header


TENSORS = st.lists(
    st.tuples(
        st.sampled_from("abcdef") | st.text(max_size=4),
        st.sampled_from(sorted(SIZES)),
        st.lists(st.integers(0, 4), max_size=3) | st.sampled_from([[0, 2**62], [2**40, 0, 2**40], [1] * 32, [1] * 33]),
    ),
    max_size=4,
    unique_by=lambda part: part[0],
)
HEADER = st.one_of(
    st.builds(lambda parts: written(side_by_side(parts)), TENSORS),
    st.builds(lambda parts, edits: written(rewritten(side_by_side(parts), edits)), TENSORS, JSON_EDITS),
    files_of(HEADERS),
    st.builds(
        lambda more: written(ONE | more),
        st.dictionaries(st.sampled_from(["a", "b", "c", "", "x" * 1025, "../x", "\ud800"]), ENTRIES, max_size=3),
    ),
)
LENGTHS = st.sampled_from([*[None] * 9, 0, 1, 7, 2**63, 2**64 - 1, 10**8, 10**8 + 1, 2**31])
"""Claimed length of the header; None: the true length."""
SURPLUS = st.sampled_from([*[0] * 9, -34, -1, 1, 100])
"""Surplus bytes of data, compared with the header."""


def data_of(header: bytes) -> int:
    """Return the number of data bytes that a header describes, if it is valid."""
    try:
        ends = [one["data_offsets"][1] for name, one in json.loads(header).items() if name != "__metadata__"]
        return int(min(max(ends, default=0), 1000))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        return 34


def safetensors(header: bytes, length: int | None = None, surplus: int = 0) -> bytes:
    claimed = len(header) if length is None else length
    return struct.pack("<Q", claimed) + header + bytes(max(data_of(header) + surplus, 0))


FILES = st.builds(safetensors, HEADER, LENGTHS, SURPLUS)


def read_all(folder: Path, _: object = None) -> None:
    """Read every listed tensor, and check that it is no larger than its file."""
    files = WeightFiles(folder)
    for name, info in files.tensors.items():
        assert info.file.parent == folder
        array = files.read(name)
        assert (array.shape, array.dtype) == (info.shape, info.dtype)
        assert array.nbytes <= info.file.stat().st_size


def test_fuzzed_headers(fuzz: Fuzz, tmp_path: Path):
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    def put(folder: Path, raw: bytes) -> None:
        (folder / "model.safetensors").write_bytes(raw)

    whole = st.builds(
        lambda tree, edits: damaged(safetensors(written(tree)), edits), st.sampled_from(HEADERS), BYTE_EDITS
    )
    fuzz(
        "safetensors header", 24_000, FILES | FILES | whole, read_all, put=put, refusals=(WeightsError,), folder=folder
    )


SHARDS = ["s1.safetensors", "s2.safetensors"]
ELSEWHERE = [
    *("link.safetensors", "loop.safetensors", "pipe.safetensors", "folder.safetensors", "gone.safetensors"),
    *(
        "../outside/s.safetensors",
        "{outside}/s.safetensors",
        "/etc/passwd",
        "folder/s1.safetensors",
        "./s1.safetensors",
    ),
    *(
        "s1.safetensors\0",
        "s1.safetensors\n",
        "s1.safetensors/",
        "..\\s.safetensors",
        "C:s.safetensors",
        ".safetensors",
    ),
    *(
        "config.json",
        "~/s.safetensors",
        "file:///etc/passwd",
        "S1.SAFETENSORS",
        "\ud800.safetensors",
        "%2e%2e.safetensors",
    ),
]
PLACES = st.sampled_from(SHARDS * 12 + ELSEWHERE)
NAMED = st.fixed_dictionaries({"a": st.just(SHARDS[0]), "b": PLACES, "c": PLACES})
INDEX = st.one_of(
    NAMED.map(lambda weight_map: written({"weight_map": weight_map})),
    NAMED.map(lambda weight_map: written({"weight_map": {**weight_map, "b": SHARDS[0]}})),
    files_of([{"metadata": {"total_size": 68}, "weight_map": {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}}]),
    st.builds(
        lambda weight_map, edits: written(rewritten({"weight_map": weight_map}, edits)),
        NAMED,
        JSON_EDITS,
    ),
)


def test_fuzzed_indices(fuzz: Fuzz, tmp_path: Path):
    """The directory also contains links, pipes and folders, and a valid shard exists outside of it."""
    folder, outside = tmp_path / "inside", tmp_path / "outside"
    for place in (folder, outside, folder / "folder.safetensors"):
        place.mkdir()
    one, two = (safetensors(json.dumps(tree).encode()) for tree in (ONE, {"c": entry("U8", [34], 0, 34)}))
    (folder / SHARDS[0]).write_bytes(one)
    (folder / SHARDS[1]).write_bytes(two)
    (folder / "config.json").write_text("{}")
    (outside / "s.safetensors").write_bytes(two)
    (folder / "link.safetensors").symlink_to(outside / "s.safetensors")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "gone.safetensors").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.safetensors")

    def put(folder: Path, raw: bytes) -> None:
        raw = raw.replace(b"{outside}", str(outside).encode())
        (folder / "model.safetensors.index.json").write_bytes(raw)

    fuzz("index file", 15_000, INDEX, read_all, put=put, refusals=(WeightsError,), folder=folder)


NAMES = ["config.json", "model.safetensors", "model.safetensors.index.json", "s1.safetensors", "model.bin"]
KINDS = st.sampled_from(["good", "good", "nothing", "empty", "out", "loop", "pipe", "folder", "passwd"])


def test_fuzzed_directories(fuzz: Fuzz, tmp_path: Path):
    """Each file may be a link, pipe or folder: reading must not block, and links to the outside are not followed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    good = {
        "config.json": b"{}",
        "model.safetensors": safetensors(json.dumps(ONE).encode()),
        "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[0]}}).encode(),
        "s1.safetensors": safetensors(json.dumps(ONE).encode()),
        "model.bin": b"\x80\x04.",
    }
    for name, content in good.items():
        (outside / name).write_bytes(content)

    def put(folder: Path, kinds: dict[str, str]) -> None:
        cleared(folder)
        for name, kind in kinds.items():
            path = folder / name
            match kind:
                case "good":
                    path.write_bytes(good[name])
                case "empty":
                    path.touch()
                case "out":
                    path.symlink_to(outside / name)
                case "loop":
                    path.symlink_to(name)
                case "pipe":
                    os.mkfifo(path)
                case "folder":
                    path.mkdir()
                case "passwd":
                    path.symlink_to("/etc/passwd")

    inputs = st.fixed_dictionaries(dict.fromkeys(NAMES, KINDS))
    fuzz("index file", 1000, inputs, read_all, put=put)
