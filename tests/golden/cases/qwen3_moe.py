"""Tiny routed models of Qwen 3."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "moe_intermediate_size": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "num_experts": 5,
    "num_experts_per_tok": 3,
}

CASES = {
    # A dense layer, then a routed one.
    "lm": Case("Qwen3MoeForCausalLM", "Qwen3MoeConfig", SIZES | {"num_hidden_layers": 2, "decoder_sparse_step": 2}),
    "some_dense": Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        SIZES
        | {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True, "attention_bias": True}
        | {"use_sliding_window": True, "sliding_window": 4, "tie_word_embeddings": True},
        golden=False,
    ),
    "classifier": Case(
        "Qwen3MoeForSequenceClassification",
        "Qwen3MoeConfig",
        SIZES | {"num_hidden_layers": 2, "num_labels": 3, "pad_token_id": 0},
        golden=False,
    ),
}
