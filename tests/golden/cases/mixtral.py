"""Tiny models of Mixtral."""

from golden.case import Family
from golden.sizes import DECODER

mixtral = Family("Mixtral", DECODER | {"intermediate_size": 8, "num_local_experts": 5, "num_experts_per_tok": 2})

CASES = {
    "lm": mixtral.causal_lm(),
    "window": mixtral.causal_lm(
        sliding_window=4,
        num_experts_per_tok=3,
        head_dim=4,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.02,
        rope_parameters={"rope_type": "default", "rope_theta": 99.0},
        golden=False,
    ),
    "classifier": mixtral.classifier(pad_token_id=0, golden=False),
}
