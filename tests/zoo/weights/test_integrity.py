"""Integrity of saved directories: errors for changed files and for changed logits."""

import json
import shutil

import jax
import jax.numpy as jnp
import numeric_parts
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

import transformer.nn.layers._layers
from transformer.__main__ import main
from transformer.config import ConfigError, EmbeddingOptions, LearnedOptions, TransformerConfig
from transformer.inference import load
from transformer.nn.models import CausalLM
from transformer.zoo import build, load_pretrained, save_pretrained, verify
from transformer.zoo._example import MAX_EXAMPLE_BYTES, TOLERANCES, make_example
from transformer.zoo.weights import WeightFiles, WeightsError
from transformer.zoo.weights._files import SHOWN
from transformer.zoo.weights._integrity import INTEGRITY_FILE, read_integrity, write_integrity

SQUARE = "transformer.h.0.attn.c_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny GPT-2 in two shards with a tokenizer, written by `save_pretrained`."""
    place = tmp_path_factory.mktemp("saved")
    loaded = load_pretrained(ours.write(place / "theirs", golden_case.golden("gpt2")["lm"]))
    tokenizer = letters(loaded.model.config.vocab_size)
    save_pretrained(loaded.model, loaded.params, place / "ours", tokenizer=tokenizer, max_shard_bytes=4000)
    return place / "ours"


def letters(size):
    """Return a tokenizer with this many entries."""
    from transformer.data.tokenizers._export import as_pretrained
    from transformer.data.tokenizers._vocabularies import CharTokenizer

    return as_pretrained(CharTokenizer([chr(ord("A") + i) for i in range(size - 3)]))


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def transpose(directory):
    """Transpose a square matrix in its file."""
    files = WeightFiles(directory)
    info, matrix = files.tensors[SQUARE], files.read(SQUARE)
    assert matrix.shape[0] == matrix.shape[1]
    with (directory / info.file.name).open("r+b") as stream:
        stream.seek(info.offset)
        stream.write(matrix.T.tobytes())


def flip_a_bit(directory):
    path = sorted(directory.glob("*.safetensors"))[-1]
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def change_heads(directory):
    path = directory / "config.json"
    values = json.loads(path.read_text())
    values["n_head"] *= 2
    path.write_text(json.dumps(values, indent=2) + "\n")


CHANGES = {
    "a transposed matrix": (transpose, r"model-\d+-of-\d+.safetensors has changed"),
    "a flipped bit": (flip_a_bit, r"model-\d+-of-\d+.safetensors has changed: expected SHA-256 \w{64}, got \w{64}"),
    "other heads": (change_heads, "config.json has changed"),
    "a missing shard": (lambda d: sorted(d.glob("*.safetensors"))[0].unlink(), r"model-00001-of-\d+.* is missing"),
    "a missing tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "another tokenizer": (
        lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text().replace('"B"', '"b"')),
        "tokenizer.json has changed",
    ),
    "half of a file": (
        lambda d: sorted(d.glob("*.safetensors"))[0].write_bytes(sorted(d.glob("*.safetensors"))[0].read_bytes()[:99]),
        r"model-00001-of-\d+.safetensors has changed",
    ),
    "weights beside them": (
        lambda d: shutil.copy(sorted(d.glob("*.safetensors"))[0], d / "model.safetensors"),
        "model.safetensors has no checksum",
    ),
    "a folder in place of a file": (
        lambda d: ((d / "tokenizer.json").unlink(), (d / "tokenizer.json").mkdir()),
        "tokenizer.json cannot be read",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_one_error_with_its_name(directory, name):
    change, message = CHANGES[name]
    change(directory)
    with pytest.raises(WeightsError, match=message) as error:
        load(directory)
    assert f"delete {directory / INTEGRITY_FILE} to accept them" in str(error.value)


@pytest.mark.parametrize("more", [0, 1, 2])
def test_many_changes_list_only_the_first(directory, more):
    names = [f"{number:02}.txt" for number in range(SHOWN + more)]
    for name in names:
        (directory / name).write_text("a")
    write_integrity(directory)
    for name in names:
        (directory / name).unlink()
    with pytest.raises(WeightsError, match=rf"{SHOWN - 1:02}\.txt is missing") as error:
        load(directory)
    assert f"{SHOWN:02}.txt" not in str(error.value)
    assert (f"and {more} more" in str(error.value)) == bool(more)
    assert "and 0 more" not in str(error.value)


@pytest.mark.parametrize("name", ["a transposed matrix", "a flipped bit", "other heads"])
def test_without_checksums_changed_files_load(directory, name):
    """No other check detects any of these changes."""
    CHANGES[name][0](directory)
    (directory / INTEGRITY_FILE).unlink()
    load(directory)


def test_unchanged_files_load_in_every_way(directory):
    from transformer.nn._sharding import make_mesh

    (directory / "generation_config.json").write_text("{}")  # an additional file
    for options in ({}, {"dtype": "bfloat16"}, {"mesh": make_mesh({"fsdp": 2, "data": -1})}):
        load(directory, **options)
    load(directory, architecture="GPT2LMHeadModel", ignore_fields=["resid_pdrop"])


def test_the_checksum_file_lists_all_files_and_is_plain_json(saved):
    values = read_integrity(saved)
    assert values["files"].keys() == {path.name for path in saved.iterdir()} - {INTEGRITY_FILE}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < values["files"].keys()
    assert len((saved / INTEGRITY_FILE).read_bytes()) < 10_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("format"), r"format.*1"),
        (lambda values: values.update(files=[]), r"files.*got \[\]"),
        (lambda values: values["files"].update({"../x": "0" * 64}), "files must name files of the directory"),
        (lambda values: values["files"].update({"config.json": "0"}), r"config.json.*64"),
        (lambda values: values.update(example=3), r"example.*got 3"),
    ],
)
def test_a_damaged_file_of_checksums_is_an_error(directory, change, message):
    values = read_integrity(directory)
    change(values)
    (directory / INTEGRITY_FILE).write_text(json.dumps(values))
    with pytest.raises(WeightsError, match=message):
        load(directory)


@pytest.mark.parametrize("text", ["", "[", "[]", '{"format": 1, "format": 1}'])
def test_a_file_that_is_not_a_json_object_is_an_error(directory, text):
    (directory / INTEGRITY_FILE).write_text(text)
    with pytest.raises(WeightsError, match=r"integrity.json"):
        load(directory)


FAMILIES = {"gpt2": "lm", "bart": "lm", "vit": "classifier", "patchtst": "forecast", "whisper": "lm", "bert": "lm"}


@pytest.mark.programs(9, reason="it loads, saves and verifies a model")
@pytest.mark.default_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_equal_the_saved_logits(tmp_path, family):
    case = next(iter(golden_case.cases(family)))
    loaded = load_pretrained(ours.write(tmp_path / "theirs", golden_case.golden(family)[case]))
    save_pretrained(loaded.model, loaded.params, tmp_path / "ours", family=family)
    assert verify(tmp_path / "ours") < 1e-6


@pytest.mark.programs(37, reason="`convert` checks and converts each parameter outside of jax.jit")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_its_own_tolerance(saved, tmp_path, dtype, capsys):
    assert main(["convert", str(saved), str(tmp_path / "half"), "--dtype", dtype]) == 0
    assert main(["verify", str(tmp_path / "half")]) == 0
    assert "files unchanged, logits within" in capsys.readouterr().out
    assert read_integrity(tmp_path / "half")["example"]["tolerance"] == TOLERANCES[dtype] > TOLERANCES["float32"]


@pytest.mark.programs(7, reason="it saves and verifies a model, and verifies it with another activation")
def test_changed_numerics_are_detected(directory, monkeypatch, capsys):
    assert main(["verify", str(directory)]) == 0
    assert "logits within 0" in capsys.readouterr().out
    monkeypatch.setitem(transformer.nn.layers._layers.ACTIVATIONS, "gelu_tanh", jax.nn.relu)
    assert main(["verify", str(directory)]) == 2
    assert "differ from those in integrity.json: at index" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, r"dtype.*float32.*bfloat16.*float16.*got 'int8'"),
        ({"inputs": []}, r"inputs.*1.*got \[\]"),
        ({"inputs": [{"tokens": [10**6]}]}, r"tokens.*8"),
        ({"places": [10**9], "logits": [1.0]}, r"places.*\d+, got 1000000000"),
        ({"places": [-1], "logits": [1.0]}, "places must be a list of non-negative integers"),
        ({"logits": ["a"]}, r"logits.*\d+"),
    ],
)
def test_an_invalid_example_is_an_error(directory, changes, message):
    values = read_integrity(directory)
    values["example"] |= changes
    (directory / INTEGRITY_FILE).write_text(json.dumps(values))
    with pytest.raises(WeightsError, match=message):
        verify(directory)


def test_a_directory_without_expected_logits_cannot_be_verified(directory, tmp_path, capsys):
    (directory / INTEGRITY_FILE).unlink()
    with pytest.raises(ConfigError, match="has no expected logits to compare with"):
        verify(directory)
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert main(["convert", str(directory)]) == 2
    assert "OUT is missing: directory to write" in capsys.readouterr().err


def test_a_large_model_is_saved_without_expected_logits():
    like = {"embedding": jax.ShapeDtypeStruct((MAX_EXAMPLE_BYTES // 4 + 1,), jnp.float32)}
    assert make_example(build("gpt2"), jax.tree.map(Sized, like), "float32") is None


class Sized:
    """Minimal stand-in for a parameter, with its size in bytes."""

    def __init__(self, like):
        self.nbytes = like.size * like.dtype.itemsize


@pytest.mark.programs(7, reason="it saves and verifies a model")
def test_a_model_with_few_positions_is_saved(tmp_path):
    sizes = {"vocab_size": 5, "d_model": 4, "num_layers": 1, "num_heads": 1}
    embedding = EmbeddingOptions(scale=False)
    config = TransformerConfig(**sizes, position=LearnedOptions(max_length=3), embedding=embedding)
    model = CausalLM(config)
    params = numeric_parts.random_params(model, np.zeros((1, 1), int))["params"]
    save_pretrained(model, params, tmp_path / "out")
    assert len(read_integrity(tmp_path / "out")["example"]["inputs"][0]["tokens"]) == 3
    assert verify(tmp_path / "out") < 1e-6
