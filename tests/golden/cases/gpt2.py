"""Tiny models of GPT-2."""

from golden.case import Case

SIZES = {"vocab_size": 37, "n_positions": 64, "n_embd": 12, "n_layer": 2, "n_head": 3}

CASES = {
    "lm": Case("GPT2LMHeadModel", "GPT2Config", SIZES),
    "untied": Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        SIZES
        | {"tie_word_embeddings": False, "n_inner": 17, "activation_function": "relu", "layer_norm_epsilon": 0.03},
    ),
    "classifier": Case("GPT2ForSequenceClassification", "GPT2Config", SIZES | {"num_labels": 3, "pad_token_id": 0}),
}
