"""Tiny models of DistilBERT."""

from golden.case import Case

SIZES = {"vocab_size": 37, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 17, "max_position_embeddings": 13}

CASES = {
    "masked_lm": Case("DistilBertForMaskedLM", "DistilBertConfig", SIZES),
    "untied": Case(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        SIZES | {"tie_word_embeddings": False, "activation": "relu", "sinusoidal_pos_embds": True},
        golden=False,
    ),
    "classifier": Case("DistilBertForSequenceClassification", "DistilBertConfig", SIZES | {"num_labels": 3}),
    "base": Case("DistilBertModel", "DistilBertConfig", SIZES, golden=False),
}
