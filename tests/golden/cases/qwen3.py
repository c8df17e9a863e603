"""Tiny models of Qwen 3."""

from golden.case import Family
from golden.sizes import DECODER

qwen3 = Family("Qwen3", DECODER | {"head_dim": 8})
BIASES = {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 0.01}
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}

CASES = {
    "lm": qwen3.causal_lm(),
    "biases_windows": qwen3.causal_lm(**BIASES, **WINDOWS, golden=False),
    "classifier": qwen3.classifier(pad_token_id=0, golden=False),
}
