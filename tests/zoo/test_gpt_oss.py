"""gpt-oss: fields of published files, and defaults of missing fields."""

import pytest

from transformer.config import ConfigError, RotaryScaling
from transformer.zoo import ENTRIES

FAMILY = ENTRIES["gpt_oss"]
HEAD = FAMILY.heads["GptOssForCausalLM"]
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def test_reads_the_published_config():
    config = FAMILY.read(PUBLISHED, HEAD)
    assert config.rotary.base == 150_000
    assert config.rotary.scaling == RotaryScaling(kind="yarn", factor=32.0, original_length=4096, truncate=False)
    assert [kind.window for kind in config.stack.period] == [128, None]
    assert (config.feed_forward.activation, config.parameters.use_bias, config.attention.sinks) == (
        "swiglu_clamped",
        True,
        True,
    )
    assert {(kind.moe.num_experts, kind.moe.top_k, kind.moe.router_bias) for kind in config.stack.period} == {
        (32, 4, True)
    }


def test_defaults_are_the_published_values():
    """Defaults of the reference: local layers first, YaRN, biases and head sizes."""
    named = ("layer_types", "rope_scaling", "rope_theta", "attention_bias", "head_dim", "num_key_value_heads")
    named += ("num_experts_per_tok", "sliding_window", "rms_norm_eps", "swiglu_limit", "tie_word_embeddings")
    silent = {name: value for name, value in PUBLISHED.items() if name not in named}
    assert FAMILY.read(silent, HEAD) == FAMILY.read(PUBLISHED, HEAD)
    plain = FAMILY.read(silent | {"rope_parameters": {"rope_type": "default"}}, HEAD)
    assert (plain.rotary.base, plain.rotary.scaling) == (150_000, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 6.0}, r"swiglu_limit.*6.0"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha.*1.0"),
        ({"layer_types": ["sliding_attention"] * 23}, r"layer_types.*23.*24"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantization_config"),
    ],
)
def test_rejects_unsupported_settings(changes, message):
    with pytest.raises(ConfigError, match=message):
        FAMILY.read(PUBLISHED | changes, HEAD)
