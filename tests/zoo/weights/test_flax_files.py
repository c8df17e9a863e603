"""Weights of transformers' Flax classes: every family that has such classes, parts of large arrays, damaged files."""

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

from transformer.zoo import load_pretrained
from transformer.zoo.weights._files import WeightFiles, WeightsError
from transformer.zoo.weights._flax_files import FLAX_FILE, FlaxFiles, open_files
from transformer.zoo.weights._msgpack import read_arrays

# Families for which transformers 4 has Flax classes (docs of 4.57, table of frameworks), and a case of each.
FAMILIES = {
    "bert": "lm",
    "gpt2": "lm",
    "t5": "lm",
    "vit": "classifier",
    "clip": "lm",
    "roberta": "lm",
    "bart": "lm",
    "marian": "lm",
    "blenderbot": "lm",
    "bloom": "lm",
    "distilbert": "lm",
    "opt": "lm",
    "llama": "lm",
    "mistral": "lm",
    "whisper": "lm",
    "dinov2": "base",
    "wav2vec2": "stable",
}
RMS_NORMS = {"t5", "llama", "mistral"}
"""Families whose Flax norms call their only parameter `weight`, as in PyTorch."""
TABLES = ("embeddings", "wte", "wpe", "shared", "embed_tokens", "embed_positions", "relative_attention_bias")
TABLES += ("token_embedding", "position_embedding", "embedding")


def flax_tree(family, tensors):
    """Convert tensors of PyTorch to parameters of Flax.

    This is `rename_key_and_reshape_tensor` of transformers 4.57 (modeling_flax_pytorch_utils.py), the direction that we
    do not have, with the kind of a module inferred from its name and rank.
    """
    flat = {}
    for name, tensor in tensors.items():
        name = name.replace("parametrizations.weight.original0", "weight_g")
        *path, last = name.replace("parametrizations.weight.original1", "weight_v").split(".")
        if last == "weight" and tensor.ndim == 1:
            last = "weight" if family in RMS_NORMS else "scale"
        elif last == "weight" and path[-1].endswith(TABLES):
            last = "embedding"
        elif last == "weight":
            last, tensor = "kernel", tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T
        flat[*path, last] = np.array(tensor, order="C")
    return flax.traverse_util.unflatten_dict(flat)


def as_flax(directory, target, family, change=lambda tree: tree):
    """Write a copy of a directory with flax_model.msgpack instead of safetensors."""
    files = WeightFiles(directory)
    tree = change(flax_tree(family, {name: files.read(name) for name in files.tensors}))
    target.mkdir()
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    (target / FLAX_FILE).write_bytes(flax.serialization.to_bytes(tree))
    return target


def case_of(family):
    found = golden_case.golden(family)
    name = FAMILIES[family]
    return found[name if name in found else next(key for key in found if key != "made with")]


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_files_of_its_flax_classes(tmp_path, family):
    directory = ours.write(tmp_path / "torch", case_of(family))
    expected = load_pretrained(directory)
    loaded = load_pretrained(as_flax(directory, tmp_path / "flax", family))
    assert loaded.architecture == expected.architecture
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)


def test_safetensors_take_precedence(tmp_path):
    directory = ours.write(tmp_path / "torch", case_of("gpt2"))
    (directory / FLAX_FILE).write_bytes(b"")
    assert type(open_files(directory)) is WeightFiles


def test_reads_chunked_arrays_and_other_dtypes(tmp_path, monkeypatch):
    directory = ours.write(tmp_path / "torch", case_of("gpt2"))
    expected = load_pretrained(directory)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)
    whole = load_pretrained(as_flax(directory, tmp_path / "parts", "gpt2"))
    jax.tree.map(np.testing.assert_array_equal, whole.params, expected.params)
    files = FlaxFiles(tmp_path / "parts")
    assert len(files._stored["transformer.wte.weight"][0].parts) > 3

    def half(tree):
        return {"params": jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), tree)}

    loaded = load_pretrained(as_flax(directory, tmp_path / "half", "gpt2", half))
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}


def test_incomplete_files_are_an_error(tmp_path):
    directory = ours.write(tmp_path / "torch", case_of("gpt2"))

    def broken(tree):
        block = tree["transformer"]["h"]["0"]
        del block["ln_1"]["scale"]
        block["attn"]["c_proj"]["kernel"] = block["attn"]["c_proj"]["kernel"][:-1]
        return tree | {"more": {"kernel": np.zeros((2, 3), np.float32)}}

    with pytest.raises(WeightsError, match=r"1.*transformer.h.0.ln_1.weight") as error:
        load_pretrained(as_flax(directory, tmp_path / "flax", "gpt2", broken))
    assert "1 unexpected: more.weight" in str(error.value)
    assert "transformer.h.0.attn.c_proj.weight: expected" in str(error.value)


def array(shape, dtype, data, kind=1):
    return msgpack.ExtType(kind, msgpack.packb((shape, dtype, data)))


TREE = {"a": {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float16)}, "b": {"scale": np.ones(())}}
GOOD = flax.serialization.to_bytes(TREE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "1 bytes are expected at byte 0, got 0: it was cut short"),
        (GOOD[:-3], "it was cut short"),
        (GOOD + b"\0", "1 bytes follow its object"),
        (msgpack.packb(3), "must be a map of parameters, got int"),
        (msgpack.packb({"a": 3}), "'a' must be an array, got int"),
        (msgpack.packb({"a": [3]}), "which a file of Flax does not have"),
        (msgpack.packb({1: array([1], "int8", b"a")}), "must be a new, printable text, got 1"),
        (b"\xdf\xff\xff\xff\xff", "8589934590 bytes are expected at byte 5, got 0"),
        (b"\x81\xdb\xff\xff\xff\xff", r"text.*4294967295"),
        (b"\x81\xa1a\xc9\xff\xff\xff\xff\x01", "4294967295 bytes are expected"),
        (b"\x81\xa1a" * 40 + b"\xc0", "nested too deeply"),
        (msgpack.packb({"a": array([2**40, 2**40], "float32", b"1234")}), "does not take 4 bytes"),
        (msgpack.packb({"a": array([0, 2**62], "float32", b"")}), "does not take 0 bytes"),
        (msgpack.packb({"a": array([-1], "float32", b"1234")}), "sizes of at least 0"),
        (msgpack.packb({"a": array([1] * 33, "int8", b"a")}), "at most 32 sizes"),
        (msgpack.packb({"a": array([1], "object", b"12345678")}), r"'object'"),
        (msgpack.packb({"a": array([1], "int8", b"a", kind=2)}), "is not an array of Flax"),
        (msgpack.packb({"a": msgpack.ExtType(1, b"\x93\x91\x01\xa4int8\xc4\x05abc")}), "does not fill its extension"),
        (
            msgpack.packb({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 9}, "chunks": {}}}),
            "must have a shape and parts of one dtype",
        ),
    ],
)
def test_damaged_files_are_one_line_errors(tmp_path, content, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / FLAX_FILE).write_bytes(content)
    with pytest.raises(WeightsError, match=message) as error:
        FlaxFiles(tmp_path)
    assert len(str(error.value)) < 1000


def test_reads_the_same_values_as_flax(tmp_path):
    (tmp_path / "a").write_bytes(GOOD)
    found = read_arrays(tmp_path / "a")
    assert {"/".join(path): (one.dtype.name, one.shape) for path, one in found.items()} == {
        "a/kernel": ("float32", (2, 3)),
        "a/bias": ("float16", (3,)),
        "b/scale": ("float64", ()),
    }


def test_the_package_msgpack_takes_the_last_of_two_equal_keys(tmp_path):
    """It also has no way to skip the data of an array: headers alone can't be read."""
    content = (
        b"\x82\xa1a" + msgpack.packb(array([1], "int8", b"a")) + b"\xa1a" + msgpack.packb(array([1], "int8", b"b"))
    )
    assert list(msgpack.unpackb(content)) == ["a"]
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="must be a new, printable text, got 'a'"):
        read_arrays(tmp_path / "a")
