"""GPTQ and AWQ: packed integers, dequantized by the formula written out; auto-gptq and AutoAWQ are not installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.__main__ import main
from transformer.zoo import load_pretrained
from transformer.zoo.weights._files import WeightFiles, WeightsError, write_weights
from transformer.zoo.weights._packed import from_awq, from_gptq
from transformer.zoo.weights._quantized import plain_files

RANDOM = np.random.RandomState(0)
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def word(integers, bits):
    """Pack integers into an int32, the first one in the lowest bits."""
    total = sum(int(one) << bits * i for i, one in enumerate(integers))
    return np.uint32(total).view(np.int32)


def gptq(inputs, out, size, bits, act_order=False, offset=1):
    """Return the tensors of a random module, and its matrix (out, in), weight by weight from the definition."""
    count, groups = 32 // bits, -(-inputs // size)
    codes, zeros = RANDOM.randint(0, 2**bits, (inputs, out)), RANDOM.randint(1, 2**bits, (groups, out))
    scales = RANDOM.uniform(0.5, 1.5, (groups, out)).astype(np.float16) / 50
    order = np.arange(inputs) // size
    order = RANDOM.permutation(order) if act_order else order
    tensors = {
        "qweight": np.array(
            [[word(codes[i : i + count, o], bits) for o in range(out)] for i in range(0, inputs, count)]
        ),
        "qzeros": np.array([[word(row[o : o + count] - offset, bits) for o in range(0, out, count)] for row in zeros]),
        "scales": scales.astype(np.float16),
        "g_idx": order.astype(np.int32),
    }
    matrix = np.empty((out, inputs), np.float32)
    for i, o in np.ndindex(inputs, out):
        matrix[o, i] = (int(codes[i, o]) - int(zeros[order[i], o])) * float(tensors["scales"][order[i], o])
    return tensors, matrix


def awq(inputs, out, size):
    groups = inputs // size
    codes, zeros = RANDOM.randint(0, 16, (inputs, out)), RANDOM.randint(0, 16, (groups, out))
    scales = (RANDOM.uniform(0.5, 1.5, (groups, out)) / 50).astype(np.float16)
    pack = lambda row: [word(row[o : o + 8][ORDER], 4) for o in range(0, out, 8)]  # noqa: E731
    tensors = {
        "qweight": np.array(list(map(pack, codes))),
        "qzeros": np.array(list(map(pack, zeros))),
        "scales": scales,
    }
    matrix = np.empty((out, inputs), np.float32)
    for i, o in np.ndindex(inputs, out):
        matrix[o, i] = (int(codes[i, o]) - int(zeros[i // size, o])) * float(scales[i // size, o])
    return tensors, matrix


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("size", "act_order", "offset"), [(8, False, 1), (8, True, 1), (24, False, 0), (16, True, 0)])
def test_gptq_equals_its_definition(bits, size, act_order, offset):
    """The last group of 16 is incomplete."""
    tensors, matrix = gptq(24, 16, size, bits, act_order, offset)
    found = from_gptq(*(tensors[name] for name in ("qweight", "qzeros", "scales", "g_idx")), bits, offset)
    np.testing.assert_array_equal(found, matrix)


@pytest.mark.parametrize("size", [8, 24])
def test_awq_equals_its_definition(size):
    tensors, matrix = awq(24, 16, size)
    np.testing.assert_array_equal(from_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"]), matrix)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 7,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
METHODS = {
    "gptq, act order": {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": True},
    "gptq v2, 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": 8, "checkpoint_format": "gptq_v2"},
    "gptq, one group": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"},
}


def llama(settings):
    """Return the tensors of a tiny quantized Llama, and the same with dequantized matrices."""
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (7, 16), "lm_head.weight": (7, 16), "model.norm.weight": (16,)}
    shapes |= {f"{layer}{name}layernorm.weight": (16,) for name in ("input_", "post_attention_")}
    small = {name: RANDOM.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    matrices = {f"{layer}self_attn.{name}_proj": (16, 16) for name in "qkvo"}
    matrices |= {f"{layer}mlp.{name}_proj": (24, 16) for name in ("gate", "up")} | {f"{layer}mlp.down_proj": (16, 24)}
    whole = dict(small)
    for name, (out, inputs) in matrices.items():
        size = inputs if settings["group_size"] == -1 else settings["group_size"]
        if settings["quant_method"] == "awq":
            parts, matrix = awq(inputs, out, size)
        else:
            offset = int("checkpoint_format" not in settings)
            parts, matrix = gptq(inputs, out, size, settings["bits"], settings.get("desc_act", False), offset)
        small |= {f"{name}.{part}": array for part, array in parts.items()}
        whole[f"{name}.weight"] = matrix
    return small, whole


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_directory_equals_the_plain_one(tmp_path, method):
    """In float16, the dtype of the scales, or in any other."""
    small, whole = llama(METHODS[method])
    write_weights(tmp_path / "small", LLAMA | {"quantization_config": METHODS[method]}, small)
    write_weights(tmp_path / "whole", LLAMA, whole)
    assert load_pretrained(tmp_path / "small").model.config.parameters.dtype == "float16"
    found, expected = (load_pretrained(tmp_path / name, dtype="float32") for name in ("small", "whole"))
    assert found.model.config == expected.model.config
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.programs(90, reason="`convert` computes the logits of a short input outside of jax.jit")
@pytest.mark.parametrize("method", ["gptq, act order", "awq"])
def test_convert_passes_the_dtype_to_the_reader(tmp_path, method):
    """The products of integers and scales in float32 have digits that float16, the default, would round."""
    small, whole = llama(METHODS[method])
    write_weights(tmp_path / "small", LLAMA | {"quantization_config": METHODS[method]}, small)
    assert main(["convert", str(tmp_path / "small"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    expected, found = plain_files(WeightFiles(tmp_path / "small")), WeightFiles(tmp_path / "out")
    assert all(expected.dtype_read(name) == expected.read(name).dtype for name in expected.tensors)
    for name, array in whole.items():
        np.testing.assert_array_equal(found.read(name), array.astype(np.float32), err_msg=name)


GPTQ = METHODS["gptq, act order"]
ONE = {f"a.{name}": array for name, array in gptq(16, 8, 8, 4)[0].items()}
TWO = {f"a.{name}": array for name, array in awq(16, 8, 8)[0].items()}


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        (GPTQ | {"bits": 3}, ONE, r"bits must be one of 4, 8, got 3"),
        (GPTQ | {"bits": True}, ONE, r"bits must be one of 4, 8, got True"),
        (GPTQ | {"checkpoint_format": "marlin"}, ONE, r"checkpoint_format must be one of .*, got 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, ONE, r"dynamic must be one of None"),
        (GPTQ, {k: v for k, v in ONE.items() if "g_idx" not in k}, r"a\.qweight has no matching a\.g_idx"),
        (GPTQ, {"a.qweight": ONE["a.qweight"]}, r"a\.qweight has no matching a\.qzeros, a\.scales, a\.g_idx"),
        (GPTQ | {"group_size": 0}, ONE, r"a\.qweight \(2, 8\): group_size must be above 0, got 0"),
        (GPTQ | {"group_size": 4}, ONE, r"expected qzeros \(4, 1\), got \(2, 1\) of int32"),
        (GPTQ, ONE | {"a.scales": np.ones((2, 8), np.int32)}, r"expected scales \(2, 8\), got \(2, 8\) of int32"),
        (
            GPTQ,
            ONE | {"a.qweight": np.ones((2, 8), np.float32)},
            r"expected two axes of int32, got \(2, 8\) of float32",
        ),
        (GPTQ, {"a.weight": np.ones((2, 8), np.float32)}, r"but there is no tensor qweight"),
        (METHODS["awq"] | {"version": "gemv"}, TWO, r"version must be one of 'gemm', got 'gemv'"),
        (METHODS["awq"] | {"zero_point": False}, TWO, r"zero_point must be one of True, got False"),
        (METHODS["awq"] | {"group_size": 5}, TWO, r"group_size does not divide 16 inputs"),
        (METHODS["awq"] | {"group_size": 4}, TWO, r"expected qzeros \(4, 1\), got \(2, 1\)"),
    ],
)
def test_rejects_parts_that_do_not_fit_together(tmp_path, settings, tensors, message):
    write_weights(tmp_path / "files", {"quantization_config": settings}, tensors)
    with pytest.raises(WeightsError, match=f"{message}"):
        plain_files(WeightFiles(tmp_path / "files"))


def test_rejects_a_group_that_does_not_exist(tmp_path):
    tensors = ONE | {"a.g_idx": np.full(16, 2, np.int32)}
    write_weights(tmp_path / "files", {"quantization_config": GPTQ}, tensors)
    with pytest.raises(WeightsError, match=r"a\.g_idx.*0.*1.*got 2.*2"):
        plain_files(WeightFiles(tmp_path / "files")).read("a.weight")


def test_a_missing_module_is_listed(tmp_path):
    """A matrix that is neither quantized nor plain is missing by name, and a left-over part is unexpected."""
    small, _ = llama(GPTQ)
    name = "model.layers.0.mlp.up_proj"
    del small[f"{name}.qweight"]
    write_weights(tmp_path / "files", LLAMA | {"quantization_config": GPTQ}, small)
    with pytest.raises(WeightsError, match=rf"1.*{name}\.weight.*3.*{name}\.g_idx"):
        load_pretrained(tmp_path / "files", dtype=jnp.float32)


def test_ordered_groups_need_no_index(tmp_path):
    """The last group is incomplete."""
    tensors, matrix = gptq(24, 8, 16, 4)
    settings = GPTQ | {"desc_act": False, "group_size": 16}
    write_weights(
        tmp_path / "files",
        {"quantization_config": settings},
        {f"a.{name}": array for name, array in tensors.items() if name != "g_idx"},
    )
    np.testing.assert_array_equal(plain_files(WeightFiles(tmp_path / "files")).read("a.weight"), matrix)
