"""Tiny models of ModernBERT: windows of two tokens to each side in two of three layers."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "local_attention": 5,
}
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}

CASES = {
    "masked_lm": Case("ModernBertForMaskedLM", "ModernBertConfig", SIZES),
    "biases": Case(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        SIZES
        | dict.fromkeys(BIASES, True)
        | {"tie_word_embeddings": False, "hidden_activation": "silu", "classifier_activation": "relu"}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "norm_eps": 0.03},
        golden=False,
    ),
    "yarn": Case(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        SIZES
        | {"decoder_bias": False, "local_attention": 4}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 99.0}}},
        golden=False,
    ),
    "classifier": Case(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        SIZES | {"num_labels": 3, "classifier_pooling": "mean"},
    ),
    "classifier_of_first": Case(
        "ModernBertForSequenceClassification", "ModernBertConfig", SIZES | {"num_labels": 3}, golden=False
    ),
    "base": Case("ModernBertModel", "ModernBertConfig", SIZES, golden=False),
}
