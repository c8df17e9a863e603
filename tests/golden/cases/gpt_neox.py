"""Tiny models of GPT-NeoX."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
QUARTER = {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.25}

CASES = {
    "lm": Case("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | {"rope_parameters": QUARTER}),
    "one_after_the_other": Case(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        SIZES
        | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}
        | {"rope_parameters": QUARTER | {"partial_rotary_factor": 1.0}, "hidden_act": "gelu_fast"},
        golden=False,
    ),
    "classifier": Case(
        "GPTNeoXForSequenceClassification",
        "GPTNeoXConfig",
        SIZES | {"num_labels": 3, "pad_token_id": 0},
        golden=False,
    ),
}
