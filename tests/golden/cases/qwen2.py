"""Tiny models of Qwen 2."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}

CASES = {
    "lm": Case("Qwen2ForCausalLM", "Qwen2Config", SIZES),
    "upper_windows": Case(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        SIZES
        | WINDOW
        | {"max_window_layers": 1, "num_hidden_layers": 3, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "layer_types": Case(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        SIZES
        | WINDOW
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3},
        golden=False,
    ),
    "classifier": Case(
        "Qwen2ForSequenceClassification", "Qwen2Config", SIZES | {"num_labels": 3, "pad_token_id": 0}, golden=False
    ),
}
