"""Fields of nested configs by dotted path and by former name: in constructors, attributes, files and flags."""

import dataclasses
import json

import pytest
from training_recipes import tiny_recipe

from transformer.config import (
    MLA,
    ConfigError,
    HeadTransform,
    LayerKind,
    MoE,
    Patches,
    RotaryOptions,
    RotaryScaling,
    Series,
    Speech,
    TransformerConfig,
)
from transformer.config._paths import fields_by_path, get_path
from transformer.training._overrides import override
from transformer.training._serial import decode, encode

CONFIG = TransformerConfig(d_model=8, num_heads=2)
LATENT = {"kv_rank": 5, "plain_dim": 3, "rotary_dim": 4, "value_dim": 2, "query_rank": 6}
# Values other than the defaults, for every former name.
FORMER = {
    "head_dim": 6,
    "value_dim": 3,
    "qk_norm": True,
    "qk_norm_scope": "all",
    "causal": True,
    "attention_biases": ("key",),
    "attention_scale": 0.5,
    "attention_softcap": 3.0,
    "attention_sinks": True,
    "attention_dropout_rate": 0.25,
    "rotary_base": 5.0,
    "rotary_dim": 4,
    "rotary_scaling": RotaryScaling(kind="linear", factor=2.0),
    "relative_buckets": 512,
    "relative_max_distance": 700,
    "scale_embeddings": False,
    "embedding_norm": True,
    "tie_embeddings": False,
    "token_types": 2,
    "source_vocab_size": 7,
    "num_encoder_layers": 7,
    "num_decoder_layers": 8,
    "final_norm": False,
    "prefix": (LayerKind(window=2),),
    "period": (LayerKind(window=5),),
    "suffix": (LayerKind(window=3),),
    "num_classes": 3,
    "pooling": "last",
    "normalize_embeddings": True,
    "head_transform": HeadTransform(activation="tanh", norm=False),
    "output_bias": True,
    "logit_scale": 2.0,
    "logit_softcap": 4.0,
}
OLD = pytest.mark.filterwarnings("ignore:.*The former name works")


@pytest.mark.parametrize("name", FORMER)
def test_every_former_name_sets_the_field_that_replaces_it(name):
    path = TransformerConfig.former_names[name]
    with pytest.warns(DeprecationWarning, match=rf"{name!r}.*{path!r}"):
        config = CONFIG.replace(**{"position": "rotary", "t5_bias.max_distance": 700} | {name: FORMER[name]})
    assert get_path(config, path) == FORMER[name] != get_path(CONFIG, path)
    with pytest.warns(DeprecationWarning, match=f"{name!r}"):
        assert getattr(config, name) == FORMER[name]


def test_no_former_name_is_forgotten():
    others = {"mla", "patches", "series", "mel_bins", "position_table_per_layer", "source_max_length"}
    assert FORMER.keys() == TransformerConfig.former_names.keys() - others


@OLD
def test_a_former_name_keeps_the_other_fields_of_its_part():
    config = dataclasses.replace(CONFIG.replace(**{"rotary.dim": 2}), rotary_base=7.0)
    assert config.rotary == RotaryOptions(base=7.0, dim=2)
    assert CONFIG.replace(rotary_base=7.0).rotary.base == 7.0


@OLD
def test_former_inputs_are_the_input():
    patches = Patches(image_height=4, image_width=4, patch_size=2)
    config = TransformerConfig(patches=patches, series=None, mel_bins=None)
    assert config.input == config.patches == patches
    assert config.series is None
    assert config.speech is None
    assert config.replace(patches=None).input is None
    assert config.replace(series=None).input == patches
    assert TransformerConfig(mel_bins=3).input == Speech(mel_bins=3)


@OLD
def test_former_names_of_parts():
    new = MLA(kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=2, q_lora_rank=6)
    assert MLA(**LATENT) == new
    assert {name: getattr(new, name) for name in LATENT} == LATENT
    moe = MoE(num_experts=4, selection_bias=True, weights_scale=2.5)
    assert moe.e_score_correction_bias
    assert moe.routed_scaling_factor == 2.5


def test_paths_set_fields_of_parts_together():
    # Each change alone would be invalid: max_distance must be above half of the buckets.
    changed = CONFIG.replace(**{"t5_bias.buckets": 512, "t5_bias.max_distance": 300})
    assert (changed.t5_bias.buckets, changed.t5_bias.max_distance) == (512, 300)
    assert TransformerConfig(**fields_by_path(changed)) == changed
    sizes = MLA(kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=2)
    latent = TransformerConfig(position="rotary", **{"attention.mla": sizes})
    assert latent.replace(**{"attention.mla.kv_lora_rank": 9}).attention.mla.kv_lora_rank == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary.bass": 5.0}, r"rotary.*'bass'.*'base'\?"),
        ({"rotery.base": 5.0}, r"'rotery.base'"),
        (
            {"attention.mla.kv_lora_rank": 5},
            r"attention.mla.*'kv_lora_rank'",
        ),
        ({"embedding.tie": "no"}, r"embedding.tie.*got 'no'"),
        ({"vocab_size.x": 3}, r"vocab_size.*'x'"),
    ],
)
def test_an_impossible_path_says_what_there_is(changes, message):
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(**changes)


def test_an_unknown_keyword_is_an_error_that_names_the_nearest():
    with pytest.raises(TypeError, match=r"'norm_epsilom'.*'norm_epsilon'\?"):
        TransformerConfig(norm_epsilom=1e-5)


def test_a_file_of_an_earlier_version_is_read_without_a_warning():
    series = {"channels": 2, "context_length": 7, "horizon": 2, "patch_length": 3, "patch_stride": 2}
    config = TransformerConfig(
        position="rotary", input=Series(**series), **{"rotary.base": 5.0, "stack.final_norm": False}
    )
    new = encode(config)
    assert decode(TransformerConfig, json.loads(json.dumps(new)), "model") == config
    old = {name: value for name, value in new.items() if not isinstance(value, dict)} | {
        "patches": None,
        "mel_bins": None,
    }
    for name, path in TransformerConfig.former_names.items():
        if path != "input":
            old[name] = encode(get_path(config, path))
    old["series"] = new["input"]
    assert decode(TransformerConfig, json.loads(json.dumps(old)), "model") == config
    del old["rotary_base"]
    with pytest.raises(
        ConfigError, match="model lacks rotary: it was written by a different version, or is incomplete"
    ):
        decode(TransformerConfig, old, "model")


def test_a_former_flag_sets_the_field_and_names_the_new_flag():
    recipe = tiny_recipe(model={"position": "rotary"})
    with pytest.warns(FutureWarning, match=r"--model.rotary-base.*--model.rotary.base"):
        changed = override(recipe, ["--model.rotary-base", "7.0"], program="train.py")
    assert changed.model.rotary.base == 7.0
    assert override(recipe, ["--model.rotary.base=9.0"], program="train.py").model.rotary.base == 9.0
    pictures = dataclasses.replace(
        recipe, model=CONFIG.replace(input=Patches(image_height=4, image_width=4, patch_size=2))
    )
    with pytest.warns(FutureWarning, match=r"--model.patches.patch-size.*--model.input.patch-size"):
        changed = override(pictures, ["--model.patches.patch-size=4"], program="train.py")
    assert changed.model.patches.patch_size == 4
