"""Tiny models of OLMo 2."""

from golden.case import Family
from golden.sizes import DECODER

olmo2 = Family("Olmo2", DECODER)
BIASES = {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 0.01, "hidden_act": "relu"}

CASES = {
    "lm": olmo2.causal_lm(),
    "biases": olmo2.causal_lm(**BIASES, golden=False),
    "classifier": olmo2.classifier(pad_token_id=0, golden=False),
}
