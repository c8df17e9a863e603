"""Tiny models of Mixtral."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}

CASES = {
    "lm": Case("MixtralForCausalLM", "MixtralConfig", SIZES),
    "window": Case(
        "MixtralForCausalLM",
        "MixtralConfig",
        SIZES
        | {"sliding_window": 4, "num_experts_per_tok": 3, "head_dim": 4, "tie_word_embeddings": True}
        | {"router_aux_loss_coef": 0.02, "rope_parameters": {"rope_type": "default", "rope_theta": 99.0}},
        golden=False,
    ),
    "classifier": Case(
        "MixtralForSequenceClassification", "MixtralConfig", SIZES | {"num_labels": 3, "pad_token_id": 0}, golden=False
    ),
}
