"""Tiny models of GPT-NeoX."""

from golden.case import Family

gpt_neox = Family(
    "GPTNeoX",
    {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 2},
)
QUARTER = {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.25}

CASES = {
    "lm": gpt_neox.causal_lm(rope_parameters=QUARTER),
    "one_after_the_other": gpt_neox.causal_lm(
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters=QUARTER | {"partial_rotary_factor": 1.0},
        hidden_act="gelu_fast",
        golden=False,
    ),
    "classifier": gpt_neox.classifier(pad_token_id=0, golden=False),
}
