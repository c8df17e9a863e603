"""Tiny models of DeepSeek-V3."""

from golden.case import Family
from golden.sizes import DECODER

LATENTS = {"q_lora_rank": 7, "kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 2}
EXPERTS = {
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 99.0, "factor": 4.0, "original_max_position_embeddings": 8}

deepseek_v3 = Family("DeepseekV3", DECODER | LATENTS | EXPERTS | {"intermediate_size": 13, "num_attention_heads": 3})

CASES = {
    # A dense layer, then a layer with experts.
    "lm": deepseek_v3.causal_lm(),
    "yarn": deepseek_v3.causal_lm(
        q_lora_rank=None,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        rms_norm_eps=1e-3,
    ),
    "biases": deepseek_v3.causal_lm(
        attention_bias=True,
        first_k_dense_replace=2,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"mscale_all_dim": 1.0},
        golden=False,
    ),
    "classifier": deepseek_v3.classifier(n_group=1, topk_group=1, pad_token_id=0, rope_parameters=YARN, golden=False),
}
