"""Tiny models of GLM-4 of 2024."""

from golden.case import Family
from golden.sizes import DECODER

SIZES = DECODER | {"head_dim": 8}
glm = Family("Glm", SIZES)

CASES = {
    "lm": glm.causal_lm(),
    "unbiased": glm.causal_lm(attention_bias=False, tie_word_embeddings=True, partial_rotary_factor=1.0, golden=False),
    "classifier": glm.classifier(pad_token_id=0, golden=False),
}
