"""Tiny text models of Gemma 4."""

from golden.case import Family
from golden.sizes import DECODER

gemma4 = Family(
    "Gemma4",
    DECODER
    | {"intermediate_size": 13, "num_key_value_heads": 3, "head_dim": 4, "sliding_window": 4, "global_head_dim": 8}
    | {"hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": 37},
    config="Gemma4TextConfig",
)
LOCAL, GLOBAL = "sliding_attention", "full_attention"
ROTARY = {
    GLOBAL: {"rope_type": "proportional", "rope_theta": 90.0, "partial_rotary_factor": 0.5},
    LOCAL: {"rope_type": "default", "rope_theta": 50.0},
}

CASES = {
    # The last two layers read the keys and values of the first two, and are twice as wide. More layers would multiply
    # the rounding errors of both implementations beyond the tolerance: scores are not scaled.
    "lm": gemma4.causal_lm(
        num_hidden_layers=4,
        layer_types=[LOCAL, GLOBAL] * 2,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=2.1,
        rope_parameters=ROTARY,
    ),
    "keys_as_values": gemma4.causal_lm(
        num_hidden_layers=4,
        layer_types=[LOCAL, GLOBAL] * 2,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        tie_word_embeddings=False,
        rope_parameters=ROTARY | {GLOBAL: ROTARY[GLOBAL] | {"factor": 3.0}},
        golden=False,
    ),
    "experts": gemma4.causal_lm(
        num_hidden_layers=3,
        layer_types=[LOCAL, GLOBAL, GLOBAL],
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=8,
        num_kv_shared_layers=1,
    ),
    "one_reader": gemma4.causal_lm(
        num_hidden_layers=3,
        layer_types=[GLOBAL, LOCAL, GLOBAL],
        num_kv_shared_layers=1,
        attention_k_eq_v=True,
        attention_bias=True,
        vocab_size_per_layer_input=41,
        golden=False,
    ),
}
