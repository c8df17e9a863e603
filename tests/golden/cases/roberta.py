"""Tiny models of RoBERTa."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 13,  # two of them for no position: as many as a row has tokens
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}

CASES = {
    "masked_lm": Case("RobertaForMaskedLM", "RobertaConfig", SIZES),
    "untied": Case(
        "RobertaForMaskedLM",
        "RobertaConfig",
        SIZES | {"tie_word_embeddings": False, "type_vocab_size": 2, "hidden_act": "relu"},
        golden=False,
    ),
    "classifier": Case("RobertaForSequenceClassification", "RobertaConfig", SIZES | {"num_labels": 3}),
    "base": Case("RobertaModel", "RobertaConfig", SIZES, options={"add_pooling_layer": False}, golden=False),
}
