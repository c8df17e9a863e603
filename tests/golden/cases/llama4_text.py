"""Tiny text models of Llama 4."""

from golden.case import Family
from golden.sizes import DECODER

llama4 = Family(
    "Llama4",
    DECODER
    | {
        "intermediate_size": 7,
        "intermediate_size_mlp": 13,
        "head_dim": 4,
        "num_hidden_layers": 4,
        "num_local_experts": 5,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 4,
        "floor_scale": 3,
        "attn_scale": 0.7,
        "router_aux_loss_coef": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 99.0},
    },
    config="Llama4TextConfig",
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 99.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

CASES = {
    # Dense layers with rotary positions and chunks, and layers with experts and a temperature. With padding on the
    # left, the reference computes the temperature of the position in the row, not in the text.
    "lm": llama4.causal_lm(left_padding=False),
    "two_experts": llama4.causal_lm(
        num_hidden_layers=3,
        moe_layers=[0, 2],
        num_experts_per_tok=2,
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=3,
        attn_temperature_tuning=False,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3,
        golden=False,
    ),
    "other_types": llama4.causal_lm(
        num_hidden_layers=2,
        layer_types=["full_attention", "chunked_attention"],
        moe_layers=[],
        use_qk_norm=False,
        attention_bias=True,
        attn_temperature_tuning=False,
        golden=False,
    ),
}
