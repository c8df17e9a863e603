"""Tiny models of SmolLM3."""

from golden.case import Family
from golden.sizes import DECODER, YARN

smollm3 = Family("SmolLM3", DECODER | {"num_hidden_layers": 4})
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "no_rope_layer_interval": 2}
EVERY = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]

CASES = {
    "lm": smollm3.causal_lm(),
    "windows": smollm3.causal_lm(**WINDOWS, attention_bias=True, tie_word_embeddings=False, rope_parameters=YARN),
    "types": smollm3.causal_lm(**WINDOWS, layer_types=EVERY, no_rope_layers=[0, 1, 1, 0], mlp_bias=True, golden=False),
    "classifier": smollm3.classifier(golden=False),
}
