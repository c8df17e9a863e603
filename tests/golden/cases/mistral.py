"""Tiny models of Mistral."""

from golden.case import Family
from golden.sizes import DECODER

mistral = Family("Mistral", DECODER | {"head_dim": 4, "sliding_window": 5, "rms_norm_eps": 1e-5})

CASES = {
    "lm": mistral.causal_lm(),
    "no_window": mistral.causal_lm(
        sliding_window=None,
        head_dim=None,
        num_attention_heads=3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 99.0},
        hidden_act="gelu",
        golden=False,
    ),
    "classifier": mistral.classifier(num_labels=5, pad_token_id=0, sliding_window=3, golden=False),
}
