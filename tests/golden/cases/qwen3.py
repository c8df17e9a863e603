"""Tiny models of Qwen 3."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}

CASES = {
    "lm": Case("Qwen3ForCausalLM", "Qwen3Config", SIZES),
    "biases_windows": Case(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        SIZES
        | {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 0.01}
        | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        golden=False,
    ),
    "classifier": Case(
        "Qwen3ForSequenceClassification", "Qwen3Config", SIZES | {"num_labels": 3, "pad_token_id": 0}, golden=False
    ),
}
