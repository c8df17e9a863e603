"""Tiny models of gpt-oss."""

from golden.case import Family
from golden.sizes import DECODER

gpt_oss = Family(
    "GptOss",
    DECODER
    | {"intermediate_size": 8, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 4}
    | {"num_local_experts": 5, "num_experts_per_tok": 3},
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 30.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 7,
    "truncate": False,
}

CASES = {
    "lm": gpt_oss.causal_lm(rope_parameters=YARN, max_position_embeddings=28),
    "published": gpt_oss.causal_lm(num_hidden_layers=3, golden=False),
    "layer_types": gpt_oss.causal_lm(
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        attention_bias=False,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.9,
        rope_parameters=YARN | {"truncate": True},
        golden=False,
    ),
    "classifier": gpt_oss.classifier(pad_token_id=0, golden=False),
}
