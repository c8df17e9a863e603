"""Tiny models of BLOOM."""

from golden.case import Family

bloom = Family("Bloom", {"vocab_size": 37, "hidden_size": 15, "n_layer": 2, "n_head": 5})

CASES = {
    "lm": bloom.causal_lm(),
    "untied": bloom.causal_lm(tie_word_embeddings=False, hidden_size=12, n_head=4, golden=False),
    "classifier": bloom.classifier(pad_token_id=0, golden=False),
}
