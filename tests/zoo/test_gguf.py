"""GGUF files: models of every supported architecture, contradictory metadata, and logits of transformers' reader."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_parts import converted, gguf, metadata_of, name_in_gguf, random_blocks, stored
from golden import case as golden_case
from golden import ours
from golden.case import numbers

from transformer import load
from transformer.__main__ import main
from transformer.config import ConfigError
from transformer.inference._export import export
from transformer.inference._opened_model import open_model
from transformer.zoo import load_pretrained
from transformer.zoo._gguf import GGUFFiles, unpermuted
from transformer.zoo.weights._files import WeightFiles, WeightsError

CASES = [("llama", "lm"), ("llama", "grouped_llama3"), ("llama", "linear"), ("qwen2", "lm"), ("qwen3", "lm")]
CASES += [("gemma", "lm"), ("gemma2", "lm")]
CHANGES = {"gemma2": {"query_pre_attn_scalar": 4}}
"""Fields that llama.cpp derives from others, so that a GGUF file can't contain other values."""


def directory_of(tmp_path, family, case):
    record = golden_case.golden(family)[case]
    config = record["config"] | CHANGES.get(family, {})
    if config["rope_parameters"]["rope_type"] == "llama3":
        config["rope_parameters"] |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    return ours.write(tmp_path / "directory", record | {"config": config})


def as_gguf(directory, to, form="F32", **changes):
    files = WeightFiles(directory)
    metadata, tensors = converted(files.config, {name: files.read(name) for name in files.tensors})
    to.write_bytes(gguf(metadata | changes, {name: stored(array, form) for name, array in tensors.items()}))
    return to


@pytest.mark.parametrize(("family", "case"), CASES)
def test_a_file_equals_the_directory_it_was_converted_from(tmp_path, family, case):
    """The config is the same, and so are the parameters, up to the rounding of 1 + w and back in the norms of Gemma."""
    directory = directory_of(tmp_path, family, case)
    expected = load_pretrained(directory)
    found = load_pretrained(as_gguf(directory, tmp_path / "model.gguf"))
    assert found.model.config == expected.model.config
    assert found.tokenizer is None
    exact = family not in ("gemma", "gemma2")
    for path, leaf in jax.tree.leaves_with_path(expected.params):
        other = found.params
        for key in path:
            other = other[key.key]
        tolerance = 0 if exact or "norm" not in str(path) else 1e-6
        np.testing.assert_allclose(other, leaf, rtol=0, atol=tolerance, err_msg=str(path))


def test_reads_yarn_and_biases_and_ignores_unused_keys(tmp_path):
    """Biases of queries and keys are permuted as their kernels; mlp_bias is a feature that llama.cpp's Llama lacks."""
    record = golden_case.golden("llama")["biases_yarn"]
    tensors = {name: shape for name, shape in record["tensors"].items() if not ("mlp" in name and "bias" in name)}
    directory = ours.write(tmp_path / "a", {"config": record["config"] | {"mlp_bias": False}, "tensors": tensors})
    file = as_gguf(directory, tmp_path / "model.gguf", **{"llama.attention.strange": 3})
    with pytest.raises(WeightsError, match=r"llama\.attention\.strange"):
        load(file)
    model, params = load(file, ignore_fields=["llama.attention.strange"])
    expected = load(directory)
    assert model.config == expected[0].config
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])


@pytest.mark.parametrize(("form", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_16_bit_weights_keep_their_dtype(tmp_path, form, dtype):
    directory = directory_of(tmp_path, "llama", "lm")
    model, params = load(as_gguf(directory, tmp_path / "model.gguf", form))
    assert model.config.parameters.dtype == dtype
    expected = load(directory, dtype=dtype)[1]
    jax.tree.map(np.testing.assert_array_equal, params, expected)


WIDE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
}


def wide_shapes():
    shapes = {"model.embed_tokens.weight": (96, 256), "lm_head.weight": (96, 256), "model.norm.weight": (256,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {f"{layer}{name}layernorm.weight": (256,) for name in ("input_", "post_attention_")}
        for name, out in {"q": 256, "k": 128, "v": 128, "o": 256}.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (out, 256)
        shapes |= {f"{layer}mlp.{name}_proj.weight": (512, 256) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (256, 512)
    return shapes


FORMS = {"attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "attn_output": "Q8_0", "ffn_gate": "Q4_0"}
FORMS |= {"ffn_up": "Q5_0", "ffn_down": "Q5_1", "token_embd": "Q4_1", "output": "Q6_K"}


def quantized_file(path, **more):
    """Write a model with a different quantized format for each kind of matrix."""
    _, tensors = converted(WIDE, {name: numbers(name, shape) for name, shape in wide_shapes().items()})
    made = {}
    for seed, (name, array) in enumerate(tensors.items()):
        form = FORMS.get(name.split(".")[-2])
        made[name] = stored(array) if form is None else random_blocks(form, array.shape, seed)
    path.write_bytes(gguf(metadata_of(WIDE, "llama") | {"general.name": "test"} | more, made))
    return path


def test_a_quantized_file_loads_as_bfloat16_by_default(tmp_path):
    file = quantized_file(tmp_path / "model.gguf")
    model, params = load(file)
    assert model.config.parameters.dtype == "bfloat16"
    wide = load(file, dtype="float32")[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype(jnp.bfloat16)), params, wide)
    assert 0.01 < np.abs(wide["decoder"]["layers"]["slot_0"]["feed_forward"]["down"]["kernel"]).mean() < 10


def test_an_export_is_a_directory_with_the_same_parameters(tmp_path):
    opened = open_model(quantized_file(tmp_path / "model.gguf"))
    export(opened, tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out")[1], opened.params)
    assert opened.context == 2048
    with pytest.raises(ConfigError, match=r"model\.gguf.*--tokenizer"):
        opened.tokenizer.encode("a")


def reference_values(file):
    """Return the tensors of a file by name, in float32, as the package gguf dequantizes them."""
    reader = pytest.importorskip("gguf").GGUFReader(file)
    dequantize = pytest.importorskip("gguf.quants").dequantize
    return {
        one.name: np.asarray(dequantize(one.data, one.tensor_type), np.float32).reshape(one.shape[::-1])
        for one in reader.tensors
    }


@pytest.mark.programs(80, reason="`convert` computes the logits of a short input outside of jax.jit")
def test_convert_passes_the_dtype_to_the_reader(tmp_path):
    """No value is rounded on the way to float32: the matrices are those of the file, which bfloat16 can't represent."""
    file = quantized_file(tmp_path / "model.gguf")
    assert main(["convert", str(file), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    expected, found = GGUFFiles(file), WeightFiles(tmp_path / "out")
    assert all(expected.dtype_read(name) == expected.read(name).dtype for name in expected.tensors)
    assert {str(found.tensors[name].dtype) for name in found.tensors} == {"float32"}
    for name in expected.tensors:
        np.testing.assert_array_equal(found.read(name), expected.read(name), err_msg=name)
    rounded = expected.read("model.layers.0.mlp.up_proj.weight")
    assert (rounded != rounded.astype(jnp.bfloat16)).mean() > 0.5


@pytest.mark.parity
def test_converted_values_equal_the_gguf_package(tmp_path):
    """The tensors of every quantized format, in float32, bit for bit; queries and keys are permuted in the file."""
    file = quantized_file(tmp_path / "model.gguf")
    theirs = reference_values(file)
    assert main(["convert", str(file), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    found = WeightFiles(tmp_path / "out")
    assert len(theirs) == len(wide_shapes())
    for name in wide_shapes():
        array = theirs[name_in_gguf(name, "llama")]
        if heads := {"q_proj": 8, "k_proj": 4}.get(name.split(".")[-2]):
            array = unpermuted(array, heads)
        np.testing.assert_array_equal(found.read(name), array, err_msg=name)


def test_an_export_does_not_widen_rounded_values(tmp_path):
    """The values were lost when the model was loaded."""
    file = quantized_file(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"rounded to bfloat16.*load the model with dtype='float32'"):
        export(open_model(file), tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, r"'mamba'.*qwen2"),
        ({"split.count": 3}, r"it is one of 3 parts: merge them"),
        ({"llama.expert_count": 8}, r"it has 8 experts"),
        ({"llama.block_count": "two"}, r"llama\.block_count.*0.*got 'two'"),
        ({"llama.feed_forward_length": np.array([3, 4], np.int32)}, r"feed_forward_length"),
        ({"llama.rope.dimension_count": 16}, r"dimension_count.*16.*32"),
        ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type.*'longrope'"),
        ({"llama.block_count": 5000}, r"5000 layers: expected at most 1024"),
        ({"llama.block_count": 3}, r"9.*model\.layers\.2\.self_attn\.q_proj\.weight"),
        ({"llama.embedding_length": 2**31 - 1}, r"d_model.*2147483647"),
    ],
)
def test_metadata_that_contradict_the_model_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load(quantized_file(tmp_path / "model.gguf", **changes))


def test_rejects_rotary_scaling_other_than_llama(tmp_path):
    directory = directory_of(tmp_path, "llama", "grouped_llama3")
    files = WeightFiles(directory)
    metadata, tensors = converted(files.config, {name: files.read(name) for name in files.tensors})
    tensors["rope_freqs.weight"][1] += 0.1
    (tmp_path / "a.gguf").write_bytes(gguf(metadata, {name: stored(array) for name, array in tensors.items()}))
    with pytest.raises(WeightsError, match=r"rope_freqs\.weight.*3\.1"):
        load(tmp_path / "a.gguf")
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        load(tmp_path / "none.gguf")


@pytest.mark.parity
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_logits_equal_transformers(tmp_path, family):
    """Tensors of every supported quantized format, read by the reader of transformers, too (package gguf)."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    if family == "llama":
        file, length = quantized_file(tmp_path / "model.gguf"), 96
    else:
        record = golden_case.golden(family)["lm"]
        directory = directory_of(tmp_path, family, "lm")
        file = as_gguf(directory, tmp_path / "model.gguf", **{"general.name": "test"})
        length = record["config"]["vocab_size"]
    # The reader of transformers does not read the head size of Qwen 3 and the soft caps of Gemma 2.
    caps = {"attn_logit_softcapping": 1.3, "final_logit_softcapping": 2.1}
    options = {"qwen3": {"head_dim": 8}, "gemma2": CHANGES["gemma2"] | caps}.get(family, {})
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager", **options
        )
    ids = np.random.RandomState(0).randint(0, length, (2, 9))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    model, params = load(file, dtype="float32")
    found = model.apply({"params": params}, jnp.asarray(ids))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_generate_reads_a_file(tmp_path, capsys):
    """With the tokenizer in its metadata, or with another one; stdout has the prompt and its continuation."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(77)), *"▁abcdefghijklmno"]
    types = np.array([2, 3, 3, *[6] * 77, *[1] * 16], np.int32)
    spm = {"model": "llama", "tokens": tokens, "scores": np.zeros(96, np.float32), "token_type": types}
    spm |= {"bos_token_id": 1, "eos_token_id": 2}
    file = quantized_file(tmp_path / "a.gguf", **{f"tokenizer.ggml.{key}": value for key, value in spm.items()})
    words = ["--prompt", "abba", "--max-new-tokens", "5", "--temperature", "0"]
    assert main(["generate", str(file), *words]) == 0
    first = capsys.readouterr().out
    assert first.startswith("abba")
    assert len(first.strip()) > 4
    open_model(file).tokenizer.save(tmp_path / "tokenizer")
    other = quantized_file(tmp_path / "b.gguf")
    assert main(["generate", str(other), *words]) == 2
    assert "b.gguf can't read text: its metadata have no tokenizer" in capsys.readouterr().err
    assert main(["generate", str(other), *words, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    assert capsys.readouterr().out == first
