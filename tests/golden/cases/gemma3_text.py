"""Tiny text models of Gemma 3."""

from golden.case import Family
from golden.sizes import DECODER

gemma3 = Family(
    "Gemma3",
    DECODER
    | {"intermediate_size": 13, "num_key_value_heads": 2, "head_dim": 4}
    | {"query_pre_attn_scalar": 61, "sliding_window": 4},
    config="Gemma3TextConfig",
)
ROTARY = {
    "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

CASES = {
    # Five local layers, a global layer, then two local layers.
    "lm": gemma3.causal_lm(num_hidden_layers=8, rope_parameters=ROTARY),
    "layer_types": gemma3.causal_lm(
        layer_types=["full_attention", "sliding_attention"],
        attention_bias=True,
        final_logit_softcapping=2.1,
        tie_word_embeddings=False,
        golden=False,
    ),
    "local": gemma3.causal_lm(rope_parameters=ROTARY, golden=False),
    "classifier": gemma3.case("TextForSequenceClassification", num_labels=3, pad_token_id=0, golden=False),
}
