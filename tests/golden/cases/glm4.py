"""Tiny models of GLM-4 of 2025."""

from golden.case import Family
from golden.cases.glm import SIZES

glm4 = Family("Glm4", SIZES)

CASES = {
    "lm": glm4.causal_lm(),
    "unbiased": glm4.causal_lm(attention_bias=False, tie_word_embeddings=True, golden=False),
    "classifier": glm4.classifier(pad_token_id=0, golden=False),
}
