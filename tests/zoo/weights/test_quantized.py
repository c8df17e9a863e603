"""Dequantization of tensors and of whole directories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.__main__ import main
from transformer.config import ConfigError
from transformer.zoo import load_pretrained
from transformer.zoo.weights._conversion import load_params
from transformer.zoo.weights._files import WeightFiles, WeightsError, write_weights
from transformer.zoo.weights._quantized import PlainFiles, from_fp8, from_mxfp4, plain_files
from transformer.zoo.weights._rules import Rule, link

HALVES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
RANDOM = np.random.RandomState(0)
OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 7,
    "hidden_size": 6,
    "intermediate_size": 11,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3], "activation_scheme": "dynamic"}}


def by_hand_mxfp4(blocks, scales):
    """Dequantize mxfp4 number by number, directly from the definition of the format."""
    experts, out, groups, _ = blocks.shape
    result = np.zeros((experts, 32 * groups, out), np.float32)
    for e, o, g, byte in np.ndindex(blocks.shape):
        for half in (0, 1):
            bits = int(blocks[e, o, g, byte]) >> 4 * half & 15
            sign = -1.0 if bits & 8 else 1.0
            result[e, 32 * g + 2 * byte + half, o] = sign * HALVES[bits & 7] * 2.0 ** (int(scales[e, o, g]) - 127)
    return result


def packed(shape, scales=(110, 130)):
    return RANDOM.randint(0, 256, (*shape, 16), np.uint8), RANDOM.randint(*scales, shape, np.uint8)


def test_mxfp4_equals_its_definition():
    """All bytes, and all scales that keep numbers finite; bfloat16 represents every number exactly."""
    blocks = RANDOM.permutation(np.arange(2 * 256, dtype=np.uint16)).astype(np.uint8).reshape(2, 4, 4, 16)
    scales = np.array([0, 1, 2, 100, 120, 126, 127, 128, 129, 140, 200, 250, 251, 252, 252, 50], np.uint8)
    scales = np.stack([scales, scales[::-1]]).reshape(2, 4, 4)
    got = from_mxfp4(blocks, scales)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), by_hand_mxfp4(blocks, scales))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, jnp.float8_e8m0fnu])
def test_fp8_equals_its_definition(dtype):
    """The last blocks are incomplete."""
    weight = RANDOM.standard_normal((11, 7)).astype(jnp.float8_e4m3fn)
    scales = (2.0 ** RANDOM.randint(-3, 3, (3, 3))).astype(dtype)
    got = from_fp8(weight, scales, (4, 3))
    for i, j in np.ndindex(11, 7):
        assert got[i, j] == float(weight[i, j]) * float(scales[i // 4, j // 3])


def oss_tensors(width=32, inner=64, experts=3):
    """Return the tensors of a tiny gpt-oss with quantized experts."""
    tensors = {"model.embed_tokens.weight": (11, width), "lm_head.weight": (11, width), "model.norm.weight": (width,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = (width,)
        for name, out, inside in (("q", 12, width), ("k", 4, width), ("v", 4, width), ("o", width, 12)):
            tensors |= {
                f"{layer}self_attn.{name}_proj.weight": (out, inside),
                f"{layer}self_attn.{name}_proj.bias": (out,),
            }
        tensors |= {f"{layer}self_attn.sinks": (3,), f"{layer}mlp.router.weight": (experts, width)}
        tensors |= {f"{layer}mlp.router.bias": (experts,), f"{layer}mlp.experts.down_proj_bias": (experts, width)}
        tensors[f"{layer}mlp.experts.gate_up_proj_bias"] = (experts, 2 * inner)
    made = {name: RANDOM.standard_normal(shape).astype(jnp.bfloat16) for name, shape in tensors.items()}
    for layer in ("model.layers.0.", "model.layers.1."):
        for name, shape in (
            ("gate_up_proj", (experts, 2 * inner, width // 32)),
            ("down_proj", (experts, width, inner // 32)),
        ):
            blocks, scales = packed(shape)
            made |= {f"{layer}mlp.experts.{name}_blocks": blocks, f"{layer}mlp.experts.{name}_scales": scales}
    return made


def plain(tensors):
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        name = name.removesuffix("_blocks")
        found[name] = by_hand_mxfp4(found.pop(f"{name}_blocks"), found.pop(f"{name}_scales")).astype(jnp.bfloat16)
    return found


def test_a_quantized_directory_equals_the_plain_one(tmp_path):
    """As in published files: bfloat16 by default, or any dtype; gate and up of the experts are interleaved."""
    tensors = oss_tensors()
    write_weights(tmp_path / "quantized", OSS | MXFP4, tensors)
    write_weights(tmp_path / "plain", OSS, plain(tensors))
    got = load_pretrained(tmp_path / "quantized")
    expected = load_pretrained(tmp_path / "plain")
    assert got.model.config == expected.model.config
    assert got.model.config.parameters.dtype == "bfloat16"
    assert "quantization_config" not in got.fields
    jax.tree.map(np.testing.assert_array_equal, got.params, expected.params)
    gate = got.params["decoder"]["layers"]["slot_0"]["feed_forward"]["experts"]["gate"]["kernel"]
    fused = plain(tensors)["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(np.asarray(gate)[0], fused[..., ::2])
    whole = load_pretrained(tmp_path / "quantized", dtype="float32")
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, np.asarray(b, np.float32)), whole.params, expected.params
    )


def llama_tensors():
    shapes = {"model.embed_tokens.weight": (7, 6), "lm_head.weight": (7, 6), "model.norm.weight": (6,)}
    layer = "model.layers.0."
    shapes |= {f"{layer}input_layernorm.weight": (6,), f"{layer}post_attention_layernorm.weight": (6,)}
    tensors = {name: RANDOM.standard_normal(shape).astype(jnp.bfloat16) for name, shape in shapes.items()}
    matrices = {f"{layer}self_attn.{name}_proj.weight": (6, 6) for name in "qkvo"}
    matrices |= {f"{layer}mlp.{name}_proj.weight": (11, 6) for name in ("gate", "up")}
    for name, (out, inside) in (matrices | {f"{layer}mlp.down_proj.weight": (6, 11)}).items():
        tensors[name] = RANDOM.standard_normal((out, inside)).astype(jnp.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = RANDOM.rand(-(-out // 4), -(-inside // 3)).astype(np.float32)
    return tensors


def test_reads_a_directory_in_fp8_blocks(tmp_path):
    """With dtype float32, values keep digits that bfloat16, the default, would round."""
    tensors = llama_tensors()
    write_weights(tmp_path / "fp8", LLAMA | FP8, tensors)
    assert load_pretrained(tmp_path / "fp8").model.config.parameters.dtype == "bfloat16"
    loaded = load_pretrained(tmp_path / "fp8", dtype="float32")
    name = "model.layers.0.mlp.down_proj.weight"
    kernel = loaded.params["decoder"]["layers"]["slot_0"]["feed_forward"]["down"]["kernel"][0]
    np.testing.assert_array_equal(kernel, from_fp8(tensors[name], tensors[f"{name}_scale_inv"], (4, 3)).T)


@pytest.mark.programs(90, reason="`convert` computes the logits of a short input outside of jax.jit")
@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_convert_passes_the_dtype_to_the_reader(tmp_path, form):
    """The matrices in float32 are the dequantized ones, and a plain tensor in float32 keeps all digits."""
    config, tensors = (LLAMA | FP8, llama_tensors()) if form == "fp8" else (OSS | MXFP4, oss_tensors())
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32) + np.float32(2**-20)
    write_weights(tmp_path / "packed", config, tensors)
    assert load_pretrained(tmp_path / "packed").model.config.parameters.dtype == "bfloat16"
    assert main(["convert", str(tmp_path / "packed"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    expected, found = plain_files(WeightFiles(tmp_path / "packed")), WeightFiles(tmp_path / "out")
    assert all(expected.dtype_read(name) == expected.read(name).dtype for name in expected.tensors)
    assert {str(found.tensors[name].dtype) for name in found.tensors} == {"float32"}
    for name in expected.tensors:
        np.testing.assert_array_equal(found.read(name), expected.read(name).astype(np.float32), err_msg=name)


def opened(tmp_path, config, tensors):
    write_weights(tmp_path / "files", config, tensors)
    return plain_files(WeightFiles(tmp_path / "files"))


def test_files_without_quantization_are_unchanged(tmp_path):
    files = opened(tmp_path, {"quantization_config": None}, {"x": np.ones(3, np.float32)})
    assert not isinstance(files, PlainFiles)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "hqq", "bits": 4}, "hqq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, {"load_in_8bit": True}),
        ("int4", "int4"),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path, settings, name):
    with pytest.raises(
        ConfigError,
        match=r",.*\(supported.*mxfp4.*fp8.*awq\)",
    ) as error:
        opened(tmp_path, {"quantization_config": settings}, {"x": np.ones(3, np.float32)})
    assert f"quantized by {name!r}" in str(error.value)


BYTES = np.zeros((1, 2, 3, 16), np.uint8)
EIGHT = np.zeros((5, 3), jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (MXFP4, {"x_blocks": BYTES}, r"x_blocks has no matching x_scales"),
        (
            MXFP4,
            {"x_blocks": BYTES, "x_scales": np.zeros((1, 2, 4), np.uint8)},
            r"x: expected blocks .* got \(1, 2, 3, 16\) of uint8",
        ),
        (MXFP4, {"x_blocks": BYTES, "x_scales": np.zeros((1, 2, 3), np.float32)}, r"\(1, 2, 3\) of float32"),
        (FP8, {"x": EIGHT}, r"x \(5, 3\) in blocks of 4 x 3: expected x_scale_inv \(2, 1\), got none"),
        (FP8, {"x": EIGHT, "x_scale_inv": np.ones((2, 2), np.float32)}, r"\(2, 1\), got \(2, 2\) of float32"),
        (FP8, {"x": EIGHT, "x_scale_inv": np.ones((2, 1), np.int32)}, r"\(2, 1\), got \(2, 1\) of int32"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
            {"x": EIGHT},
            r"weight_block_size must be two positive integers, got None",
        ),
    ],
)
def test_rejects_parts_that_do_not_fit_together(tmp_path, config, tensors, message):
    with pytest.raises(WeightsError, match=f"{message}"):
        opened(tmp_path, config, tensors)


@pytest.mark.parametrize(("scale", "number"), [(255, "nan"), (254, "-inf")])
def test_invalid_scales_are_detected(tmp_path, scale, number):
    blocks, scales = np.full((1, 2, 1, 16), 0xF1, np.uint8), np.full((1, 2, 1), 127, np.uint8)
    scales[0, 1] = scale
    files = opened(tmp_path, MXFP4, {"x_blocks": blocks, "x_scales": scales})
    shapes = {"x": (1, 32, 2)}
    links = link([Rule("x", "x")], shapes, {})
    with pytest.raises(WeightsError, match=rf"x\[0.*1\].*{number}"):
        load_params(files, links, shapes, "float32", lambda path, array: array)


def test_reads_parameters_of_several_dtypes(tmp_path):
    """Dtypes per path: a bias that needs float32 keeps it when the other parameters are bfloat16."""
    bias = np.array([14.7001, 14.7002], np.float32)
    write_weights(tmp_path / "files", {}, {"kernel": np.ones((2, 2), np.float32), "bias": bias})
    files, shapes = WeightFiles(tmp_path / "files"), {"kernel": (2, 2), "bias": (2,)}
    links = link([Rule("kernel", "kernel"), Rule("bias", "bias")], shapes, {})
    dtypes = {"kernel": jnp.bfloat16, "bias": np.float32}
    params = load_params(files, links, shapes, dtypes, lambda path, array: array)
    assert params["kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["bias"], bias)


@pytest.mark.parity
def test_both_formats_equal_the_reference():
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    blocks, scales = packed((3, 6, 2))
    for dtype in (torch.bfloat16, torch.float32):
        theirs = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=dtype)
        np.testing.assert_array_equal(from_mxfp4(blocks, scales).astype(np.float32), theirs.float().numpy())
    weight = torch.randn(8, 6).to(torch.float8_e4m3fn)
    factors = torch.rand(2, 2)
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(weight, factors)
    ours = from_fp8(weight.view(torch.uint8).numpy().view(jnp.float8_e4m3fn), factors.numpy(), (4, 3))
    np.testing.assert_array_equal(ours, theirs.numpy())
