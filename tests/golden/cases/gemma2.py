"""Tiny models of Gemma 2."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "query_pre_attn_scalar": 7,
    "sliding_window": 5,
    "attn_logit_softcapping": 1.3,
    "final_logit_softcapping": 2.1,
}

CASES = {
    "lm": Case("Gemma2ForCausalLM", "Gemma2Config", SIZES),
    "layer_types": Case(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        SIZES
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_hidden_layers": 3}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
        | {"tie_word_embeddings": False},
        golden=False,
    ),
    "classifier": Case(
        "Gemma2ForSequenceClassification", "Gemma2Config", SIZES | {"num_labels": 3, "pad_token_id": 0}, golden=False
    ),
}
