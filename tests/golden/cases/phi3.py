"""Tiny models of Phi-3."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 5,
    "pad_token_id": 0,
}
HALF = {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.5}

CASES = {
    "lm": Case("Phi3ForCausalLM", "Phi3Config", SIZES),
    "partial": Case(
        "Phi3ForCausalLM",
        "Phi3Config",
        SIZES | {"sliding_window": None, "tie_word_embeddings": True, "rope_parameters": HALF},
        golden=False,
    ),
    "classifier": Case("Phi3ForSequenceClassification", "Phi3Config", SIZES | {"num_labels": 3}, golden=False),
}
