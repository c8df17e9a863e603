"""Tiny models of Qwen 3 Next."""

from golden.case import Family
from golden.sizes import DECODER

qwen3_next = Family(
    "Qwen3Next",
    DECODER
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 3,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.5},
    },
)
DENSE = {"num_experts": 0, "linear_conv_kernel_dim": 2, "linear_num_value_heads": 2}

CASES = {
    "lm": qwen3_next.causal_lm(),
    "dense": qwen3_next.causal_lm(
        **DENSE,
        layer_types=["full_attention", "linear_attention"],
        tie_word_embeddings=True,
        golden=False,
    ),
    "mixed": qwen3_next.causal_lm(mlp_only_layers=[0], norm_topk_prob=False, golden=False),
}
