"""Tiny models of Llama."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}

CASES = {
    "lm": Case("LlamaForCausalLM", "LlamaConfig", SIZES),
    "grouped_llama3": Case(
        "LlamaForCausalLM",
        "LlamaConfig",
        SIZES
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
        | {"rope_parameters": LLAMA3},
    ),
    "biases_yarn": Case(
        "LlamaForCausalLM",
        "LlamaConfig",
        SIZES | {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "rope_parameters": YARN},
    ),
    "linear": Case(
        "LlamaForCausalLM",
        "LlamaConfig",
        SIZES | {"rope_parameters": {"rope_type": "linear", "rope_theta": 99.0, "factor": 3.0}},
    ),
    "classifier": Case("LlamaForSequenceClassification", "LlamaConfig", SIZES | {"num_labels": 3, "pad_token_id": 0}),
}
