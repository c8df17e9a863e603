"""Tiny models of BERT."""

from golden.case import Family
from golden.sizes import ENCODER

bert = Family("Bert", ENCODER | {"vocab_size": 37, "max_position_embeddings": 13})
OTHER = {"type_vocab_size": 5, "hidden_act": "gelu_new", "layer_norm_eps": 0.03}

CASES = {
    "masked_lm": bert.masked_lm(),
    "untied": bert.masked_lm(tie_word_embeddings=False, **OTHER, golden=False),
    "classifier": bert.classifier(),
    "base": bert.case("Model", options={"add_pooling_layer": False}),
    "pooler": bert.case("Model"),
}
