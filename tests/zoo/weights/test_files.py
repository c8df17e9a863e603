"""Checkpoint directories: round trips, compatibility with the safetensors library, errors for invalid files."""

import json
import os
import struct
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformer.zoo.weights import _header as header
from transformer.zoo.weights._files import WeightFiles, WeightsError, first_non_finite, write_weights

FLOATS = [np.float32, np.float16, jnp.bfloat16]
OTHERS = [np.float64, np.int64, np.uint8, np.bool_, np.complex64, jnp.float8_e4m3fn, jnp.float8_e5m2]


def arrays(dtypes=FLOATS) -> dict[str, np.ndarray]:
    """Return tensors of each dtype with odd sizes, a scalar and an empty tensor."""
    made = {f"h.{i}.w": (np.arange(i + 3 * 5) % 7).astype(dtype) for i, dtype in enumerate(dtypes)}
    return made | {"scalar": np.array(1.5, np.float32), "none": np.zeros((0, 3), np.float32)}


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file_of(tensors: dict | bytes, data: int = 24) -> bytes:
    raw = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def put(directory: Path, weights: bytes | None = None, **others: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    if weights is not None:
        (directory / "model.safetensors").write_bytes(weights)
    for name, content in others.items():
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        (directory / name.replace("__", ".")).write_bytes(content)
    return directory


def put_index(directory: Path, weight_map: object, **shards: bytes) -> Path:
    put(directory, **{f"{name}__safetensors": content for name, content in shards.items()})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def fault(directory: Path, pattern: str) -> None:
    with pytest.raises(WeightsError, match=pattern) as caught:
        WeightFiles(directory)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("max_shard_bytes", [2**30, 100])
def test_files_survive_a_round_trip(tmp_path, max_shard_bytes):
    tensors = arrays(FLOATS + OTHERS)
    write_weights(tmp_path / "out", {"model_type": "ä"}, tensors, max_shard_bytes=max_shard_bytes)
    files = WeightFiles(tmp_path / "out")
    assert files.config == {"model_type": "ä"}
    assert files.tensors.keys() == tensors.keys()
    assert len({info.file for info in files.tensors.values()}) == (1 if max_shard_bytes > 100 else 7)
    for name, expected in tensors.items():
        got = files.read(name)
        np.testing.assert_array_equal(got, expected, strict=True)
        assert (files.tensors[name].dtype, files.tensors[name].shape) == (expected.dtype, expected.shape)
        assert got.flags.writeable
        assert got.base is None, "memory of its own"
        assert files.tensors[name].offset % expected.dtype.itemsize == 0, "aligned for readers that map the file"


def test_the_safetensors_library_reads_our_files(tmp_path):
    tensors = arrays()
    write_weights(tmp_path, {}, tensors)
    read = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, expected in tensors.items():
        np.testing.assert_array_equal(read[name], expected, strict=True)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_reads_files_of_the_safetensors_library(tmp_path):
    tensors = arrays(FLOATS + OTHERS[:4])
    safetensors.numpy.save_file(tensors, put(tmp_path) / "model.safetensors", {"some": "words"})
    files = WeightFiles(tmp_path)
    assert files.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        np.testing.assert_array_equal(files.read(name), expected, strict=True)


def test_shards_have_the_names_and_the_index_that_transformers_writes(tmp_path):
    tensors = {name: np.full((3,), value, np.float32) for value, name in enumerate("abcde")}
    write_weights(tmp_path, {}, tensors.items(), max_shard_bytes=24)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 60}
    assert index["weight_map"] == {
        **dict.fromkeys("ab", "model-00001-of-00003.safetensors"),
        **dict.fromkeys("cd", "model-00002-of-00003.safetensors"),
        "e": "model-00003-of-00003.safetensors",
    }
    expected = {*index["weight_map"].values(), "model.safetensors.index.json", "config.json"}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_arrays_are_created_one_at_a_time(tmp_path):
    alive = []

    def make():
        assert not any(reference() is not None for reference in alive), "the one before is gone"
        array = np.ones((5, 7), np.float32).T  # not contiguous
        alive.append(weakref.ref(array))
        return array

    write_weights(tmp_path, {}, ((name, make) for name in "abc"))
    assert WeightFiles(tmp_path).tensors["b"].shape == (7, 5)
    assert len(alive) == 6


def test_nothing_is_overwritten_and_incomplete_files_do_not_open(tmp_path):
    def broken():
        raise RuntimeError("the second time")

    calls = iter([lambda: np.ones(3), broken])
    with pytest.raises(RuntimeError, match="the second time"):
        write_weights(tmp_path / "out", {}, {"a": lambda: next(calls)()})
    assert not (tmp_path / "out").exists()
    shapes = iter([3, 5])
    with pytest.raises(WeightsError, match=r"float64.*\(3,\).*got float64.*\(5,\)"):
        write_weights(tmp_path / "out", {}, {"a": lambda: np.ones(next(shapes))})
    write_weights(tmp_path / "out", {}, {"a": np.ones(3)})
    with pytest.raises(WeightsError, match=r"is not empty, and files are never overwritten\. Pass a new directory"):
        write_weights(tmp_path / "out", {}, {"a": np.zeros(3)})
    (tmp_path / "killed" / ".partial").mkdir(parents=True)
    with pytest.raises(WeightsError, match="is not empty"):
        write_weights(tmp_path / "killed", {}, {})
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        WeightFiles(tmp_path / "killed")


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"a\n": np.ones(3)}, r"tensor 'a\\n': a name must have 1 to 1024 printable characters"),
        ({}, {"": np.ones(3)}, "tensor '': a name must"),
        ({}, {"__metadata__": np.ones(3)}, r"'__metadata__'"),
        ({}, {"a": np.array(["x"])}, r"'a'.*int8.* got <U1"),
        ({}, [("a", np.ones(3)), ("a", np.ones(3)), ("\t", np.ones(3))], r"tensor 'a' appears twice; tensor '\\t'"),
        ({"a": {1, 2}}, {}, r"config.json.*JSON"),
        ({"a": float("nan")}, {}, r"config.*JSON"),
    ],
)
def test_reports_unwritable_outputs_before_writing(tmp_path, config, tensors, message):
    with pytest.raises(WeightsError, match=message):
        write_weights(tmp_path / "out", config, tensors)
    assert not (tmp_path / "out").exists()


HEADERS = {
    "overlap": ({"a": entry(), "b": entry(shape=(3,), offsets=(12, 24))}, "'b' overlaps the previous one"),
    "hole": (
        {"a": entry(shape=(1,), offsets=(0, 4)), "b": entry(shape=(4,), offsets=(8, 24))},
        "'b' comes after a gap",
    ),
    "shift": ({"a": entry(shape=(5,), offsets=(4, 24))}, "comes after a gap: expected its data at byte 0, got 4"),
    "short": ({"a": entry(shape=(9,), offsets=(0, 36))}, "its tensors take 36 bytes, got 24: the file was cut short"),
    "long": ({"a": entry(shape=(1,), offsets=(0, 4))}, "its tensors take 4 bytes, got 24: there is extra data"),
    "size": ({"a": entry(shape=(2, 2))}, r"F32 of shape \[2, 2\] takes 16 bytes, got 24"),
    "wrap": ({"a": entry(shape=(2**32, 2**32, 1), offsets=(0, 0))}, "is too large"),
    "63 bits": ({"a": entry(shape=(2**61,), offsets=(0, 0))}, "is too large"),
    "wrap0": ({"a": entry(shape=(0, 2**62), offsets=(0, 0))}, "is too large"),
    "minus": ({"a": entry(shape=(-2, -3))}, r"shape must be at most 32 non-negative integers, got \[-2, -3\]"),
    "rank": ({"a": entry(shape=[1] * 33)}, "shape must be at most 32"),
    "bool": ({"a": entry(shape=(True, 6))}, "shape must be"),
    "float": ({"a": entry(offsets=(0, 24.0))}, "data_offsets must be two non-negative integers"),
    "nan": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,24]}}', "shape must be"),
    "three": ({"a": entry(offsets=(0, 24, 48))}, "data_offsets must be two"),
    "dtype": ({"a": entry(dtype="F4")}, "dtype must be one of BOOL, .* got 'F4'"),
    "list": ({"a": entry(dtype=["F32"])}, r"got \['F32'\]"),
    "field": ({"a": {"dtype": "F32"}}, "expected dtype, shape and data_offsets"),
    "twice": (b'{"a":1,"a":2}', "duplicate key 'a'"),
    "control": ({"a\x1b[2J": entry()}, r"tensor 'a\\x1b\[2J': a name must"),
    "surrogate": (b'{"\\ud800":{}}', "a name must"),
    "empty": ({"": entry()}, "tensor '': a name must"),
    "name": ({"a" * 1025: entry()}, "a name must have 1 to 1024 printable characters, got 1025"),
    "metadata": ({"__metadata__": {"a": 1}}, "__metadata__ must contain strings by name"),
    "blank": (b' {"a":1}', "its header must begin with '{'"),
    "utf8": (b'{"\xff":1}', "byte 2 is not valid UTF-8"),
    "deep": (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    "cut": (b'{"a":', "its header is not valid JSON"),
    "digits": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,24]}}', "not valid JSON"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_reports_a_broken_header(tmp_path, case):
    tensors, message = HEADERS[case]
    fault(put(tmp_path, file_of(tensors)), message)


def test_all_faults_are_in_one_message(tmp_path):
    tensors = {f"t{i}": entry(dtype="F1") for i in range(23)}
    (put(tmp_path, file_of(tensors)) / "config.json").write_text("[]")
    fault(tmp_path, r"(?s)config\.json must contain an object, got list.*tensor 't0'.*tensor 't18'.*and 4 more")


def test_reports_a_truncated_file_before_allocating_memory(tmp_path):
    fault(put(tmp_path, b"abc"), "expected at least 8 bytes, got 3")
    fault(
        put(tmp_path, struct.pack("<Q", 2**63) + b"{}"),
        f"claims a length of {2**63} bytes: expected at most 2 .*has 10",
    )
    with (put(tmp_path) / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", header.MAX_HEADER_BYTES + 1))
        stream.truncate(2**31)  # sparse: takes no disk space
    fault(tmp_path, "expected at most 100000000")


def test_reports_a_file_changed_after_opening(tmp_path):
    files = WeightFiles(put(tmp_path, file_of({"a": entry()})))
    assert files.read("a").shape == (2, 3)
    put(tmp_path, file_of({"a": entry()}, data=23))
    with pytest.raises(WeightsError, match=r"model\.safetensors.*'a'.*24.*, got 23"):
        files.read("a")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        files.read("a")
    with pytest.raises(WeightsError, match=r"has no tensor 'ab'\. Did you mean 'a'\?"):
        files.read("ab")


def test_any_nonzero_byte_is_true(tmp_path):
    flags = file_of({"a": entry("BOOL", (3,), (0, 3))}, data=0) + b"\x00\x01\x07"
    array = WeightFiles(put(tmp_path, flags)).read("a")
    assert array.view(np.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "name", ["../b.safetensors", "/b.safetensors", "x/b.safetensors", "b.bin", "b\n.safetensors", 3]
)
def test_an_index_names_files_of_its_directory(tmp_path, name):
    (tmp_path / "b.safetensors").write_bytes(file_of({"a": entry()}))
    fault(put_index(tmp_path / "x", {"a": name}), "must be in a .safetensors file of the directory, got")


def test_an_index_of_very_many_files_is_refused_before_any_is_opened(tmp_path, monkeypatch):
    def opened(*given):
        raise AssertionError(given)

    monkeypatch.setattr("transformer.zoo.weights._files.read_header", opened)
    index = {f"t{i}": f"{i}.safetensors" for i in range(4097)}
    fault(put_index(tmp_path, index), r"index\.json: expected at most 4,096 files, got 4,097\.\nDownload")


def test_an_index_and_its_shards_must_agree(tmp_path):
    one, two = file_of({"a": entry()}), file_of({"a": entry(offsets=(0, 24))})
    three = file_of({"b": entry(), "extra": entry(offsets=(24, 48))}, 48)
    index = {"a": "s1.safetensors", "b": "s3.safetensors", "c": "s2.safetensors", "d": "s4.safetensors"}
    put_index(tmp_path, index, s1=one, s2=two, s3=three)
    fault(
        tmp_path,
        r"(?s)tensor 'a' is in two files, s1\.safetensors and s2\.safetensors.*tensor 'c' is not in s2\.safetensors, "
        r"although.*tensor 'extra' of s3\.safetensors is not listed in model.*s4\.safetensors is missing",
    )
    for wrong in ([], {}, None, "s1.safetensors"):
        fault(put_index(tmp_path, wrong), "weight_map must be a non-empty object with file names")
    put_index(tmp_path, {"a": "s1.safetensors"})
    assert WeightFiles(tmp_path).tensors.keys() == {"a"}


def test_links_must_stay_inside_or_in_the_hub_cache(tmp_path):
    outside = tmp_path / "outside.json"
    outside.write_text('{"secret": 1}')
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1").write_text('{"model_type": "gpt2"}')
    (blobs / "2").write_bytes(file_of({"a": entry()}))
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/2")
    files = WeightFiles(snapshot)
    assert files.config == {"model_type": "gpt2"}
    assert files.read("a").shape == (2, 3)
    (snapshot / "other.json").symlink_to(outside)
    with pytest.raises(WeightsError, match=r"other\.json.*outside\.json"):
        files.json("other.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("config.json")
    fault(snapshot, r"config\.json is missing or a broken link")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_paths_that_are_not_files_are_rejected_immediately(tmp_path, make):
    make(put(tmp_path) / "model.safetensors")
    fault(tmp_path, r"model\.safetensors must be a regular file")
    (tmp_path / "config.json").unlink()
    make(tmp_path / "config.json")
    fault(tmp_path, r"(?s)config\.json must be a regular file.*model\.safetensors must be a regular file")


def test_unsupported_formats_are_rejected_with_a_remedy(tmp_path):
    put(tmp_path, pytorch_model__bin=b"")
    fault(
        tmp_path,
        r"pytorch_model\.bin: .*pickle can execute arbitrary code.*transformers: AutoModel.*safe_serialization=True",
    )
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.gguf")
    fault(tmp_path, r"model\.gguf: this format is not supported")
    (tmp_path / "model.gguf").unlink()
    fault(tmp_path, r"expected model\.safetensors or .*, got config\.json\. Download the complete")
    with pytest.raises(FileNotFoundError, match="no directory"):
        WeightFiles(tmp_path / "other")


def test_a_missing_optional_json_file_is_allowed(tmp_path, monkeypatch):
    put(tmp_path, file_of({"a": entry()}), modules__json=[{"idx": 0}], bad__json=b'{"a": 1, "a": 2}')
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    files = WeightFiles(tmp_path)
    assert files.json("generation_config.json") is None
    assert files.json("modules.json", list) == [{"idx": 0}]
    assert files.json("1_Pooling/config.json") == {"pooling_mode_mean_tokens": True}
    with pytest.raises(WeightsError, match=r"modules\.json"):
        files.json("modules.json")
    with pytest.raises(WeightsError, match=r"bad\.json.*JSON.*'a'"):
        files.json("bad.json")
    (tmp_path.parent / "x.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"'\.\./x\.json'"):
        files.json("../x.json")
    monkeypatch.setattr("transformer.zoo.weights._files.MAX_JSON_BYTES", 15)
    with pytest.raises(WeightsError, match=r"bad\.json.*15.*got 16"):
        files.json("bad.json")


@pytest.mark.parametrize("dtype", [*FLOATS, np.float64, np.complex64, jnp.float8_e4m3fn])
def test_the_first_non_finite_value_is_found(dtype):
    array = np.ones((3, 5), dtype)
    assert first_non_finite(array) is None
    array[1, 2] = array[2, 0] = np.nan
    assert first_non_finite(array) == (1, 2)
    assert first_non_finite(np.ones((0, 3), dtype)) is None
    assert first_non_finite(np.ones(3, np.int64)) is None


HEADER = json.dumps({"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", (5,), (24, 34))}).encode()
INDEX = json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}).encode()
PIECES = [b"-1", b"0", b"NaN", b'"', b"{", b"}", b"[", b"\\", b"\0", b"\xff", b"../", b"/etc/passwd", b"1e999", b"null"]
EDITS = st.tuples(st.integers(0, 200), st.integers(0, 9), st.sampled_from(PIECES) | st.binary(max_size=3))


@given(st.sampled_from(["config.json", "s.safetensors", "model.safetensors.index.json"]), st.lists(EDITS, max_size=3))
@example("s.safetensors", [])
@settings(max_examples=150, deadline=None)
def test_no_mutation_crashes_or_opens_a_file_outside(tmp_path_factory, which, edits):
    directory = tmp_path_factory.getbasetemp() / "fuzzed"
    raw = {
        "config.json": b"{}",
        "s.safetensors": HEADER,
        "model.safetensors.index.json": INDEX.replace(b"model.", b"s."),
    }
    for start, length, piece in edits:
        raw[which] = raw[which][:start] + piece + raw[which][start + length :]
    put(directory)
    for name, content in raw.items():
        (directory / name).write_bytes(file_of(content, 34) if name.endswith(".safetensors") else content)
    try:
        files = WeightFiles(directory)
    except WeightsError:
        assert edits
        return
    for name, info in files.tensors.items():
        assert info.file.parent == directory
        assert files.read(name).nbytes == info.nbytes


def test_the_safetensors_library_loads_the_last_of_two_equal_names(tmp_path):
    """Duplicate names are rejected, because tools may disagree about which of the tensors to load."""
    places = [json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]}).encode() for at in (0, 4, 0)]
    header = b'{"a":%s,"a":%s,"b":%s}' % tuple(places)
    raw = struct.pack("<Q", len(header)) + header + np.array([1, 2], np.float32).tobytes()
    assert safetensors.numpy.load(raw)["a"] == 2
    (tmp_path / "model.safetensors").write_bytes(raw)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="duplicate key 'a'"):
        WeightFiles(tmp_path)
