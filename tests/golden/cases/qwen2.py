"""Tiny models of Qwen 2."""

from golden.case import Family
from golden.sizes import DECODER, YARN

qwen2 = Family("Qwen2", DECODER)
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 3}

CASES = {
    "lm": qwen2.causal_lm(),
    "upper_windows": qwen2.causal_lm(**WINDOW, max_window_layers=1, tie_word_embeddings=True, rope_parameters=YARN),
    "layer_types": qwen2.causal_lm(
        **WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"], golden=False
    ),
    "classifier": qwen2.classifier(pad_token_id=0, golden=False),
}
