"""Tiny models of Phi-3."""

from golden.case import Family
from golden.sizes import DECODER

phi3 = Family(
    "Phi3",
    DECODER
    | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5, "pad_token_id": 0},
)
HALF = {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.5}

CASES = {
    "lm": phi3.causal_lm(),
    "partial": phi3.causal_lm(sliding_window=None, tie_word_embeddings=True, rope_parameters=HALF, golden=False),
    "classifier": phi3.classifier(golden=False),
}
