"""Tiny models of BLOOM."""

from golden.case import Case

SIZES = {"vocab_size": 37, "hidden_size": 15, "n_layer": 2, "n_head": 5}

CASES = {
    "lm": Case("BloomForCausalLM", "BloomConfig", SIZES),
    "untied": Case(
        "BloomForCausalLM",
        "BloomConfig",
        SIZES | {"tie_word_embeddings": False, "hidden_size": 12, "n_head": 4},
        golden=False,
    ),
    "classifier": Case(
        "BloomForSequenceClassification", "BloomConfig", SIZES | {"num_labels": 3, "pad_token_id": 0}, golden=False
    ),
}
