"""Fields of nested configs by dotted path: in constructors and in `replace`."""

import pytest

from transformer.config import MLA, ConfigError, RotaryOptions, T5BiasOptions, TransformerConfig
from transformer.config._paths import fields_by_path

CONFIG = TransformerConfig(d_model=8, num_heads=2)


def test_several_paths_set_fields_of_one_part():
    # Each change alone would be invalid: max_distance must be above half of the buckets.
    changed = CONFIG.replace(position=T5BiasOptions(), **{"position.buckets": 512, "position.max_distance": 300})
    assert (changed.position.buckets, changed.position.max_distance) == (512, 300)
    assert TransformerConfig(**fields_by_path(changed)) == changed
    sizes = MLA(kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=2)
    latent = TransformerConfig(position=RotaryOptions(), **{"attention.mla": sizes})
    assert latent.replace(**{"attention.mla.kv_lora_rank": 9}).attention.mla.kv_lora_rank == 9
    rotary = CONFIG.replace(position=RotaryOptions(dim=2)).replace(**{"position.base": 7.0})
    assert rotary.position == RotaryOptions(base=7.0, dim=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": RotaryOptions(), "position.bass": 5.0}, r"position.*'bass'.*'base'\?"),
        ({"rotery.base": 5.0}, r"'rotery.base'"),
        (
            {"attention.mla.kv_lora_rank": 5},
            r"attention.mla.*'kv_lora_rank'",
        ),
        ({"embedding.tie": "no"}, r"embedding.tie.*got 'no'"),
        ({"vocab_size.x": 3}, r"vocab_size.*'x'"),
        ({"norm": "rms_norm"}, r"norm must be NormOptions.*'rms_norm'"),
    ],
)
def test_an_unknown_path_lists_the_available_fields(changes, message):
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(**changes)


def test_an_unknown_keyword_suggests_the_nearest():
    with pytest.raises(TypeError, match=r"'dropout_rat'.*'dropout_rate'\?"):
        TransformerConfig(dropout_rat=0.1)


def test_a_field_of_a_part_without_its_path_is_an_error_that_names_the_path():
    with pytest.raises(TypeError, match=r"'d_ff'.*'feed_forward.d_ff'\?"):
        TransformerConfig(d_ff=8)
    with pytest.raises(TypeError, match=r"'norm_epsilon'.*'norm.epsilon'\?"):
        TransformerConfig(norm_epsilon=1e-5)
    with pytest.raises(ConfigError, match=r"'scale'.*'attention.scale' or 'embedding.scale'"):
        CONFIG.replace(scale=2.0)
