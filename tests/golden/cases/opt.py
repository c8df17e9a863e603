"""Tiny models of OPT."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "ffn_dim": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 67,
}
POST = SIZES | {"do_layer_norm_before": False, "enable_bias": False, "activation_function": "gelu"}

CASES = {
    "lm": Case("OPTForCausalLM", "OPTConfig", SIZES),
    "post": Case("OPTForCausalLM", "OPTConfig", POST | {"tie_word_embeddings": False}, golden=False),
    "classifier": Case(
        "OPTForSequenceClassification", "OPTConfig", SIZES | {"num_labels": 3, "pad_token_id": 0}, golden=False
    ),
}
