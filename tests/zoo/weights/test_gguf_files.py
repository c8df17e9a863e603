"""GGUF headers and blocks: the definition of each format, weight by weight, and damaged files."""

import struct

import numpy as np
import pytest
from gguf_parts import CODES, gguf, random_blocks, stored, text, value_of

from transformer.zoo.weights._gguf import read_gguf
from transformer.zoo.weights._gguf_blocks import FORMATS

QUANTIZED = [blocks.name for blocks in FORMATS.values() if blocks.dequantized]


def half(block, at):
    return np.float32(np.frombuffer(block[at : at + 2].tobytes(), np.float16)[0])


def nibble(block, start, group, i):
    """Return weight i of 4-bit codes: of each `group` bytes, the lower halves come first."""
    part, inside = divmod(i, 2 * group)
    return int(block[start + part * group + inside % group]) >> 4 * (inside >= group) & 15


def six_bits(block, i):
    """Return scale and minimum of group i (`get_scale_min_k4` of ggml)."""
    q = block[4:16].astype(int)
    if i < 4:
        return q[i] & 63, q[i + 4] & 63
    return (q[i + 4] & 15) | (q[i - 4] >> 6 << 4), (q[i + 4] >> 4) | (q[i] >> 6 << 4)


def by_hand(form, block, i):
    """Return weight i of a block, from the definition of the format."""
    if form == "Q8_0":
        return half(block, 0) * np.float32(block[2 + i].view(np.int8))
    if form in ("Q4_0", "Q4_1"):
        code = nibble(block, 2 if form == "Q4_0" else 4, 16, i)
        return half(block, 0) * np.float32(code - 8) if form == "Q4_0" else half(block, 0) * code + half(block, 2)
    if form in ("Q5_0", "Q5_1"):
        start = 2 if form == "Q5_0" else 4
        high = int.from_bytes(block[start : start + 4].tobytes(), "little") >> i & 1
        code = nibble(block, start + 4, 16, i) + 16 * high
        return half(block, 0) * np.float32(code - 16) if form == "Q5_0" else half(block, 0) * code + half(block, 2)
    if form == "Q6_K":
        high = int(block[128 + i // 128 * 32 + i % 32]) >> 2 * (i % 128 // 32) & 3
        code = nibble(block, 0, 64, i) + 16 * high - 32
        return half(block, 208) * np.float32(block[192 + i // 16].view(np.int8)) * np.float32(code)
    scale, minimum = six_bits(block, i // 32)
    code = nibble(block, 16 if form == "Q4_K" else 48, 32, i)
    if form == "Q5_K":
        code += 16 * (int(block[16 + i % 32]) >> i // 32 & 1)
    return half(block, 0) * np.float32(scale) * np.float32(code) - half(block, 2) * np.float32(minimum)


@pytest.mark.parametrize("form", QUANTIZED)
def test_every_weight_equals_its_definition(form):
    blocks = FORMATS[CODES[form]]
    raw = np.frombuffer(random_blocks(form, (5, 256))[2], np.uint8)
    found = blocks.decode(raw)
    assert found.dtype == np.float32
    expected = [by_hand(form, block, i) for block in raw.reshape(-1, blocks.nbytes) for i in range(blocks.size)]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    assert np.unique(found).size > 200


@pytest.mark.parametrize(("form", "bound"), [("Q8_0", 1 / 220), ("Q4_0", 1 / 7)])
def test_dequantized_weights_are_close(form, bound):
    """The blocks that the tests write: the error is at most half a step, and rounding of the scale."""
    array = np.random.RandomState(0).standard_normal((7, 64)).astype(np.float32)
    _, _, raw = stored(array, form)
    found = FORMATS[CODES[form]].decode(np.frombuffer(raw, np.uint8)).reshape(array.shape)
    largest = np.abs(array.reshape(-1, 32)).max(1).repeat(32).reshape(array.shape)
    assert (np.abs(found - array) <= bound * largest).all()
    assert np.abs(found - array).max() > 0


@pytest.mark.parity
@pytest.mark.parametrize("form", QUANTIZED)
def test_every_block_equals_the_gguf_package(form):
    """Bit for bit, random bytes: also infinite scales. The tests write Q8_0 and Q4_0 as the package does."""
    package = pytest.importorskip("gguf")
    kind = package.GGMLQuantizationType(CODES[form])
    blocks = FORMATS[CODES[form]]
    raw = np.random.RandomState(0).randint(0, 256, (9000, blocks.nbytes)).astype(np.uint8)
    with np.errstate(all="ignore"):
        expected = package.quants.dequantize(raw, kind).reshape(-1)
    np.testing.assert_array_equal(blocks.decode(raw.reshape(-1)).view(np.uint32), expected.view(np.uint32))
    if form in ("Q8_0", "Q4_0"):
        array = np.random.RandomState(1).standard_normal((64, 96)).astype(np.float32)
        assert package.quants.quantize(array, kind).tobytes() == stored(array, form)[2]


@pytest.mark.parity
def test_headers_equal_the_gguf_package(tmp_path):
    """A file that its writer makes, with values of every type."""
    package = pytest.importorskip("gguf")
    writer = package.GGUFWriter(tmp_path / "a.gguf", "llama")
    values = {"uint8": 200, "int8": -7, "uint16": 999, "int16": -999, "uint32": 2**31, "int32": -3, "uint64": 2**40}
    values |= {"int64": -(2**40), "float32": 0.5, "float64": 0.1, "bool": True, "string": "¿qué?"}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("a.texts", ["x", "", "ñ"])
    writer.add_array("a.numbers", [1.5, -2.0])
    array = np.random.RandomState(0).standard_normal((6, 64)).astype(np.float32)
    writer.add_tensor("plain", array)
    kind = package.GGMLQuantizationType.Q8_0
    writer.add_tensor("small", package.quants.quantize(array, kind), raw_dtype=kind)
    for step in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{step}")()
    writer.close()
    found = read_gguf(tmp_path / "a.gguf")
    assert {key.removeprefix("a."): found.metadata[key] for key in found.metadata if key[2:] in values} == values
    assert found.metadata["a.texts"] == ["x", "", "ñ"]
    np.testing.assert_array_equal(found.metadata["a.numbers"], [1.5, -2.0])
    content = (tmp_path / "a.gguf").read_bytes()
    plain, small = found.tensors["plain"], found.tensors["small"]
    assert content[plain.offset : plain.offset + plain.nbytes] == array.tobytes()
    assert (small.shape, small.format.name, small.nbytes) == ((6, 64), "Q8_0", 6 * 2 * 34)
    assert content[small.offset : small.offset + small.nbytes] == stored(array, "Q8_0")[2]


VECTOR = {"a": stored(np.ones(8))}
GOOD = gguf({"general.architecture": "llama", "list": ["a", "b"], "numbers": np.arange(3, dtype=np.int32)}, VECTOR)


def with_tensors(*described, data=bytes(64)):
    """Return a file with these descriptions: (name, sizes in the order of the file, format, offset)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(described), 0)
    for name, sizes, form, offset in described:
        head += text(name) + struct.pack("<I", len(sizes)) + b"".join(struct.pack("<Q", s) for s in sizes)
        head += struct.pack("<IQ", form, offset)
    return head + bytes(-len(head) % 32) + data


BAD = {
    "another file": (b"PK\3\4" + GOOD[4:], r"must begin with GGUF, got b'PK"),
    "nothing": (b"", r"must begin with GGUF, got b''"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + GOOD[8:], r"its version must be one of 2, 3, got 1"),
    "big-endian": (
        b"GGUF" + struct.pack(">I", 3) + GOOD[8:],
        r"got 50331648, which a computer with another byte order",
    ),
    "many keys": (
        GOOD[:16] + struct.pack("<Q", 2**60) + GOOD[24:],
        r"claims 1152921504606846976 keys: expected at most",
    ),
    "many tensors": (GOOD[:8] + struct.pack("<Q", 2**63) + GOOD[16:], r"claims 9223372036854775808 tensors"),
    "long text": (GOOD[:24] + struct.pack("<Q", 2**62) + GOOD[32:], r"a text at byte 32 has 4611686018427387904 bytes"),
    "cut in the header": (GOOD[:85], r"bytes are expected at byte \d+, got"),
    "cut in the data": (GOOD[:-20], r"tensor 'a' ends at byte \d+, but the file has \d+ bytes: it was cut short"),
    "long array": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 10, 2**61) + bytes(64),
        r"claims 2305843009213693952 numbers in 'k': expected at most 8",
    ),
    "many texts": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(64),
        r"claims 2305843009213693952 texts in 'k': expected at most 8",
    ),
    "array of arrays": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
        r"'k' is an array of the type 9: expected numbers or texts",
    ),
    "unknown type": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 77), r"unknown type 77"),
    "twice": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("k") + value_of(1)), r"must be new and printable"),
    "not UTF-8": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"\1" + bytes(7) + b"\xff" + value_of(1), r"is not UTF-8"),
    "alignment": (gguf({"general.alignment": 3}, {}), r"alignment must be a multiple of 8 .* got 3"),
    "format": (with_tensors(("a", (256,), 10, 0)), r"tensor 'a' has the format Q2_K, which is not supported"),
    "unknown format": (with_tensors(("a", (8,), 99, 0)), r"tensor 'a' has the format 99, which is not supported"),
    "block": (with_tensors(("a", (16, 2), 2, 0)), r"last axis must be a multiple of 32, .* Q4_0, got \(2, 16\)"),
    "size": (with_tensors(("a", (2**40, 2**40), 0, 0)), r"shape \(1099511627776, 1099511627776\) or offset 0 is too"),
    "rank": (with_tensors(("a", (1,) * 33, 0, 0)), r"expected at most 32 axes, got 33"),
    "overlap": (with_tensors(("a", (16,), 0, 0), ("b", (8,), 0, 32)), r"tensor 'b' overlaps another one"),
    "same name": (with_tensors(("a", (8,), 0, 0), ("a", (8,), 0, 32)), r"two tensors have the name 'a'"),
    "offset": (with_tensors(("a", (8,), 0, 4)), r"its offset 4 is not a multiple of 32"),
    "name": (with_tensors(("a\n", (8,), 0, 0)), r"must have 1 to 1024 printable characters"),
}


@pytest.mark.parametrize("kind", BAD)
def test_damaged_files_are_one_line_errors(tmp_path, kind):
    content, message = BAD[kind]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_gguf(tmp_path / "a.gguf")
    assert len(str(error.value)) < 400
    assert str(error.value).isprintable()


def test_a_header_is_read(tmp_path):
    (tmp_path / "a.gguf").write_bytes(GOOD)
    found = read_gguf(tmp_path / "a.gguf")
    assert found.metadata["list"] == ["a", "b"]
    np.testing.assert_array_equal(found.metadata["numbers"], [0, 1, 2])
    assert (found.tensors["a"].shape, found.tensors["a"].format.name) == ((8,), "F32")


def test_long_texts_and_vocabularies_are_read(tmp_path):
    metadata = {"template": "x" * 2_000_000, "tokens": [f"token {i}" for i in range(60_000)]}
    (tmp_path / "long.gguf").write_bytes(gguf(metadata, {}))
    assert read_gguf(tmp_path / "long.gguf").metadata == metadata


@pytest.mark.parity
def test_the_package_gguf_accepts_tensors_that_overlap(tmp_path):
    """It also allocates memory for the numbers that a file claims, one at a time, before it compares their count."""
    reader = pytest.importorskip("gguf").GGUFReader
    described = b"".join(text(name) + struct.pack("<IQIQ", 1, 8, 0, 0) for name in "ab")
    file = tmp_path / "a.gguf"
    file.write_bytes((b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + described).ljust(200, b"\0"))
    assert len({tensor.data_offset for tensor in reader(file).tensors}) == 1
    with pytest.raises(ValueError, match="overlaps another one"):
        read_gguf(file)
