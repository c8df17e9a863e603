"""Tiny models of GPT-2."""

from golden.case import Family

gpt2 = Family("GPT2", {"vocab_size": 37, "n_positions": 64, "n_embd": 12, "n_layer": 2, "n_head": 3})
OTHER = {"n_inner": 17, "activation_function": "relu", "layer_norm_epsilon": 0.03}

CASES = {
    "lm": gpt2.case("LMHeadModel"),
    "untied": gpt2.case("LMHeadModel", tie_word_embeddings=False, **OTHER),
    "classifier": gpt2.classifier(pad_token_id=0),
}
