"""Tiny models of Mistral."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "sliding_window": 5,
    "rms_norm_eps": 1e-5,
}

CASES = {
    "lm": Case("MistralForCausalLM", "MistralConfig", SIZES),
    "no_window": Case(
        "MistralForCausalLM",
        "MistralConfig",
        SIZES
        | {"sliding_window": None, "head_dim": None, "num_attention_heads": 3, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}, "hidden_act": "gelu"},
        golden=False,
    ),
    "classifier": Case(
        "MistralForSequenceClassification",
        "MistralConfig",
        SIZES | {"num_labels": 5, "pad_token_id": 0, "sliding_window": 3},
        golden=False,
    ),
}
