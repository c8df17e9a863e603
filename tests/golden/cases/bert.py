"""Tiny models of BERT."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 13,
}

CASES = {
    "masked_lm": Case("BertForMaskedLM", "BertConfig", SIZES),
    "untied": Case(
        "BertForMaskedLM",
        "BertConfig",
        SIZES | {"tie_word_embeddings": False, "type_vocab_size": 5, "hidden_act": "gelu_new", "layer_norm_eps": 0.03},
        golden=False,
    ),
    "classifier": Case("BertForSequenceClassification", "BertConfig", SIZES | {"num_labels": 3}),
    "base": Case("BertModel", "BertConfig", SIZES, options={"add_pooling_layer": False}),
}
