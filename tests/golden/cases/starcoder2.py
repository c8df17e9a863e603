"""Tiny models of StarCoder 2."""

from golden.case import Family
from golden.sizes import DECODER

starcoder2 = Family("Starcoder2", DECODER | {"num_key_value_heads": 2, "sliding_window": 5})
PLAIN = {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False, "norm_epsilon": 0.03}

CASES = {
    "lm": starcoder2.causal_lm(),
    "plain": starcoder2.causal_lm(**PLAIN, golden=False),
    "classifier": starcoder2.classifier(pad_token_id=0, golden=False),
}
