"""Tiny models of Gemma 1."""

from golden.case import Family
from golden.sizes import DECODER

gemma = Family("Gemma", DECODER | {"head_dim": 4})

CASES = {
    "lm": gemma.causal_lm(),
    "untied": gemma.causal_lm(tie_word_embeddings=False, attention_bias=True, num_hidden_layers=1, golden=False),
    "classifier": gemma.classifier(pad_token_id=0, golden=False),
}
