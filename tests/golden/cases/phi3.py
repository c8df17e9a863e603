"""Tiny models of Phi-3."""

from dataclasses import replace

from golden.case import Family
from golden.sizes import DECODER

phi3 = Family(
    "Phi3",
    DECODER
    | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5, "pad_token_id": 0},
)
HALF = {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.5}
FACTORS = {"rope_type": "longrope", "rope_theta": 99.0, "short_factor": [1.0, 1.3], "long_factor": [2.0, 7.0]}
# Texts of 11 tokens, and of 8 with padding, are longer than 7. With 20, they and the generated tokens are not.
LONG = {"max_position_embeddings": 64, "original_max_position_embeddings": 7, "sliding_window": None}
SHORT = {"max_position_embeddings": 64, "original_max_position_embeddings": 20, "sliding_window": None}

CASES = {
    "lm": phi3.causal_lm(),
    "partial": phi3.causal_lm(sliding_window=None, tie_word_embeddings=True, rope_parameters=HALF, golden=False),
    "long": phi3.causal_lm(**LONG, rope_parameters=FACTORS),
    "short": replace(
        phi3.causal_lm(**SHORT, rope_parameters=FACTORS | {"attention_factor": 1.4}, golden=False), new_tokens=9
    ),
    "classifier": phi3.classifier(golden=False),
}
