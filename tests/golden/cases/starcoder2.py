"""Tiny models of StarCoder 2."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "sliding_window": 5,
}

CASES = {
    "lm": Case("Starcoder2ForCausalLM", "Starcoder2Config", SIZES),
    "plain": Case(
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        SIZES | {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False, "norm_epsilon": 0.03},
        golden=False,
    ),
    "classifier": Case(
        "Starcoder2ForSequenceClassification",
        "Starcoder2Config",
        SIZES | {"num_labels": 3, "pad_token_id": 0},
        golden=False,
    ),
}
