"""Malicious or damaged directories: loading raises an error quickly."""

import json
import types

import jax
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

from transformer.config import LayerKind
from transformer.config._layer_patterns import fold
from transformer.zoo import load_pretrained
from transformer.zoo.weights import SAME, TensorInfo, WeightFiles, check_complete, write_weights
from transformer.zoo.weights._rules import Link, Target


@pytest.fixture
def load_with(tmp_path):
    """Load the tiny model of a family with changed fields in its config.json."""

    def load(changes, family="llama", case="lm", **options):
        record = golden_case.golden(family)[case]
        directory = ours.write(tmp_path / "theirs", record | {"config": record["config"] | changes})
        return load_pretrained(directory, **options)

    return load


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": 3}, r"config.json.*LlamaForCausalLM.*got 3"),
        ({"architectures": "LlamaModel"}, r"got 'LlamaModel'"),
        ({"architectures": [["LlamaModel"]]}, r"got \[\['LlamaModel'\]\]"),
        ({"model_type": ["llama"]}, r"model_type.*\['llama'\].*config.json"),
        ({"num_hidden_layers": 10**9}, r"config.json.*1000000000.*1024"),
        ({"hidden_size": 10**9}, r"d_model.*1000000000.*\d+"),
        ({"head_dim": 10**9}, r"num_heads.*head_dim.*3000000000"),
        ({"vocab_size": 10**12}, r"vocab_size.*2147483647"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps.*2147483647"),
        ({"rope_parameters": {"factor": [10**400]}}, r"rope_parameters"),
        ({"rope_parameters": {"rope_theta": 0}}, r"position.base.*5e-324.*got 0.0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": "no"}},
            r"truncate.*got 'no'",
        ),
        (
            {"quantization_config": {"quant_method": [3]}},
            r"\[3\].*\(supported.*mxfp4.*fp8.*awq\)",
        ),
        ({f"wonder{i}": 1 for i in range(103)}, "; 3 more are not known"),
        ({"num_attention_heads": -3}, r"num_attention_heads.*1.*got -3"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings.*got 'false'"),
    ],
)
def test_invalid_values_are_immediate_errors(load_with, changes, message):
    with pytest.raises(ValueError, match=message):
        load_with(changes)


@pytest.mark.parametrize(
    ("family", "case", "changes", "message"),
    [
        ("gemma3_text", "lm", {"num_hidden_layers": 10**9, "layer_types": None}, "specifies 1000000000 layers"),
        ("qwen3_moe", "lm", {"num_experts": 10**9}, "specifies [0-9]+ experts in all layers together"),
        # No image of this size is allocated.
        ("vit", "classifier", {"image_size": 2**20, "patch_size": 2**20}, "patch_embeddings.projection.weight"),
    ],
)
def test_sizes_without_weights_allocate_no_memory(load_with, family, case, changes, message):
    with pytest.raises(ValueError, match=message):
        load_with(changes, family, case)


def test_many_layers_without_a_pattern_are_folded_quickly():
    kinds = [LayerKind(window=1 + i * i % 97) for i in range(150)]
    ends = fold(kinds)
    repeats = (len(kinds) - len(ends["stack.prefix"]) - len(ends["stack.suffix"])) // len(ends["stack.period"])
    assert [*ends["stack.prefix"], *ends["stack.period"] * repeats, *ends["stack.suffix"]] == kinds
    assert fold([LayerKind()] * 1024) == {"stack.prefix": (), "stack.period": (LayerKind(),), "stack.suffix": ()}


def test_reports_many_missing_and_unknown_names_early():
    """The file of another model with many experts: comparing all pairs of names would take hours."""
    links = [Link((f"layers.{i}.expert.w1",), (Target(f"w{i}"),), SAME) for i in range(4000)]
    tensors = {f"layers.{i}.experts.w1": TensorInfo(f"{i}", np.dtype("f4"), (2,), None, 0) for i in range(4000)}
    files = types.SimpleNamespace(directory="here", config_file="config.json", tensors=tensors)
    with pytest.raises(ValueError, match=r"layers.0.expert.w1 \(there.*layers.0.experts.w1\).*3980") as error:
        check_complete(files, links, {f"w{i}": (2,) for i in range(4000)})
    assert len(str(error.value)) < 5000


@pytest.mark.parametrize("dtype", ["int8", "float64", "bf16", 3])
def test_accepts_only_supported_parameter_dtypes(load_with, dtype):
    with pytest.raises(ValueError, match=rf"dtype.*float32.*bfloat16.*float16.*got {dtype!r}"):
        load_with({}, dtype=dtype)


def changed(directory, name, change):
    """Return a copy of the directory with one tensor changed."""
    files = WeightFiles(directory)
    tensors = {one: files.read(one) for one in files.tensors}
    tensors[name] = change(tensors[name])
    write_weights(directory.with_name("changed"), files.config, tensors)
    return directory.with_name("changed")


GATE = "model.layers.1.mlp.gate_proj.weight"


def test_values_outside_the_range_of_a_dtype_are_named(load_with):
    directory = changed(load_with({}).directory, GATE, lambda tensor: tensor * np.float32(1e6))
    with pytest.raises(ValueError, match=rf"{GATE} \(float16\)"):
        load_pretrained(directory, dtype="float16")
    params = load_pretrained(directory, dtype="bfloat16").params
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.complex64])
def test_weights_are_real_numbers(load_with, dtype):
    directory = changed(load_with({}).directory, GATE, lambda tensor: tensor.astype(dtype))
    with pytest.raises(ValueError, match=rf"1.*{GATE}.*{np.dtype(dtype)}"):
        load_pretrained(directory)


def test_a_tokenizer_may_not_be_a_link_outside_the_directory(load_with, tmp_path):
    directory = load_with({}).directory
    (tmp_path / "elsewhere.json").write_text(json.dumps({}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match=r"tokenizer_config.json.*,"):
        load_pretrained(directory)


def test_a_mesh_must_have_all_axes(load_with):
    with pytest.raises(ValueError, match=r"mesh must have the axes data, fsdp, .* got rows: data, fsdp, expert"):
        load_with({}, mesh=jax.make_mesh((2,), ("rows",)))
