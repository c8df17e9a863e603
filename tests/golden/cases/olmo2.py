"""Tiny models of OLMo 2."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}

CASES = {
    "lm": Case("Olmo2ForCausalLM", "Olmo2Config", SIZES),
    "biases": Case(
        "Olmo2ForCausalLM",
        "Olmo2Config",
        SIZES | {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 0.01, "hidden_act": "relu"},
        golden=False,
    ),
    "classifier": Case(
        "Olmo2ForSequenceClassification", "Olmo2Config", SIZES | {"num_labels": 3, "pad_token_id": 0}, golden=False
    ),
}
