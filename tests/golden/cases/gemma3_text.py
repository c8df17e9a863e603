"""Tiny text models of Gemma 3."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 13,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "query_pre_attn_scalar": 61,
    "sliding_window": 4,
}
ROTARY = {
    "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

CASES = {
    # Five local layers and a global one, then two local ones.
    "lm": Case("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES | {"num_hidden_layers": 8, "rope_parameters": ROTARY}),
    "layer_types": Case(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        SIZES
        | {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2, "attention_bias": True}
        | {"final_logit_softcapping": 2.1, "tie_word_embeddings": False},
        golden=False,
    ),
    "local": Case(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        SIZES | {"num_hidden_layers": 2, "rope_parameters": ROTARY},
        golden=False,
    ),
    "classifier": Case(
        "Gemma3TextForSequenceClassification",
        "Gemma3TextConfig",
        SIZES | {"num_hidden_layers": 2, "num_labels": 3, "pad_token_id": 0},
        golden=False,
    ),
}
