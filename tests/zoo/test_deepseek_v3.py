"""DeepSeek-V3: additional contents of published files, and the meaning of config fields."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

from transformer.config import ConfigError
from transformer.zoo import ENTRIES, build, load_pretrained, save_pretrained
from transformer.zoo.families._deepseek_v3 import FusedHeads, Interleaved
from transformer.zoo.weights._files import write_weights
from transformer.zoo.weights._rules import MATRIX, Fused

FAMILY = ENTRIES["deepseek_v3"]
HEAD = FAMILY.heads["DeepseekV3ForCausalLM"]


def test_multi_token_prediction_layers_are_ignored(tmp_path):
    record = golden_case.golden("deepseek_v3")["lm"]
    ahead = {"enorm.weight": [12], "eh_proj.weight": [12, 24], "shared_head.head.weight": [37, 12]}
    ahead = {f"model.layers.61.{name}": shape for name, shape in ahead.items()}
    ahead["model.layers.0.self_attn.rotary_emb.inv_freq"] = [2]
    plain = load_pretrained(ours.write(tmp_path / "plain", record))
    more = load_pretrained(ours.write(tmp_path / "more", record | {"tensors": record["tensors"] | ahead}))
    jax.tree.map(np.testing.assert_array_equal, more.params, plain.params)
    strange = record["tensors"] | {"model.layers.60.enorm.weight": [12]}
    with pytest.raises(ValueError, match=r"1.*model.layers.60.enorm.weight"):
        load_pretrained(ours.write(tmp_path / "strange", record | {"tensors": strange}))


def test_reads_fp8_weights_and_a_float32_router(tmp_path):
    record = golden_case.golden("deepseek_v3")["lm"]
    plain, eight = {}, {}
    for name, shape in record["tensors"].items():
        array = golden_case.numbers(name, tuple(shape))
        if name.endswith("proj.weight") or "kv_a_proj" in name:
            small = array.astype(jnp.float8_e4m3fn)
            blocks = tuple(-(-size // 4) for size in shape)
            scales = np.exp2(np.arange(math.prod(blocks)) % 5 - 2).astype(np.float32).reshape(blocks)
            array = small.astype(np.float32) * np.kron(scales, np.ones((4, 4), np.float32))[: shape[0], : shape[1]]
            eight |= {name: small, f"{name}_scale_inv": scales}
        else:
            eight[name] = array
        plain[name] = array
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 4]}
    write_weights(tmp_path / "plain", record["config"], plain)
    write_weights(tmp_path / "eight", record["config"] | {"quantization_config": quantized}, eight)
    expected = load_pretrained(tmp_path / "plain", dtype="bfloat16").params
    got = load_pretrained(tmp_path / "eight", dtype="bfloat16").params
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    router = got["decoder"]["suffix_0"]["feed_forward"]["router"]
    assert (router["kernel"].dtype, router["selection_bias"].dtype) == (jnp.bfloat16, jnp.float32)


def test_rotary_pairs_are_reordered():
    """Two heads with one unrotated and four rotated dimensions: 0 1 2 3 in the file, 0 2 1 3 here."""
    file = np.arange(20.0).reshape(10, 2)
    relation = Interleaved(MATRIX, 4)
    (kernel,) = relation.load([file], [(2, 2, 5)])
    assert kernel[0].tolist() == [[0, 2, 6, 4, 8], [10, 12, 16, 14, 18]]
    np.testing.assert_array_equal(relation.save([kernel])[0], file)

    relation = Interleaved(Fused(), 6)  # a latent of 3 dimensions, not rotated
    file = np.arange(18.0).reshape(9, 2)
    latent, turned = relation.load([file], [(2, 3), (2, 6)])
    assert (latent[0].tolist(), turned[0].tolist()) == ([0, 2, 4], [6, 10, 14, 8, 12, 16])
    np.testing.assert_array_equal(relation.save([latent, turned])[0], file)


def test_keys_and_values_are_interleaved_by_head():
    file = np.arange(20.0).reshape(10, 2)
    shapes = [(2, 2, 3), (2, 2, 2)]
    assert FusedHeads().tensor_shapes(shapes) == [(10, 2)]
    key, value = FusedHeads().load([file], shapes)
    assert (key[0].tolist(), value[0].tolist()) == ([[0, 2, 4], [10, 12, 14]], [[6, 8], [16, 18]])
    np.testing.assert_array_equal(FusedHeads().save([key, value])[0], file)


def test_the_published_yarn_settings_scale_the_scores():
    config = build("deepseek-v3").config
    assert config.rotary.scaling.attention_factor == 1.0
    assert config.attention.scale == pytest.approx(192**-0.5 * (1 + 0.1 * math.log(40)) ** 2)
    assert build("moonlight-16b-a3b").config.attention.scale is None


@pytest.mark.parametrize("weights", [{}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale_all_dim": 0.707}])
@pytest.mark.parametrize("kind", [{"rope_type": "yarn"}, {"rope_type": "linear"}, {"rope_type": "default"}])
def test_yarn_scale_settings_survive_a_round_trip(kind, weights):
    values = golden_case.golden("deepseek_v3")["lm"]["config"]
    rope = {"factor": 5.0, "rope_theta": 99.0} | kind | weights
    config = FAMILY.read(values | {"rope_parameters": rope}, HEAD)
    assert (config.attention.scale is None) == (kind["rope_type"] == "default" or not weights)
    assert FAMILY.read(FAMILY.write(config, "DeepseekV3ForCausalLM"), HEAD) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_interleave": False}, r"rope_interleave"),
        ({"scoring_func": "softmax"}, r"scoring_func.*'softmax'"),
        ({"topk_method": "greedy"}, r"topk_method.*'greedy'"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq.*2"),
        ({"n_shared_experts": 0}, r"n_shared_experts.*0"),
        (
            {"num_key_value_heads": 1},
            r"num_key_value_heads.*1.*3",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor.*0.5"),
    ],
)
def test_unsupported_settings_are_rejected_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        FAMILY.read(golden_case.golden("deepseek_v3")["lm"]["config"] | fields, HEAD)


def test_the_model_is_saved_as_deepseek_v3(tmp_path):
    loaded = load_pretrained(ours.write(tmp_path / "theirs", golden_case.golden("deepseek_v3")["lm"]))
    save_pretrained(loaded.model, loaded.params, tmp_path / "ours")
    assert load_pretrained(tmp_path / "ours").family.name == "deepseek_v3"
