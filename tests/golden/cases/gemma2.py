"""Tiny models of Gemma 2."""

from golden.case import Family
from golden.sizes import DECODER

gemma2 = Family(
    "Gemma2",
    DECODER
    | {"head_dim": 4, "query_pre_attn_scalar": 7, "sliding_window": 5}
    | {"attn_logit_softcapping": 1.3, "final_logit_softcapping": 2.1},
)

CASES = {
    "lm": gemma2.causal_lm(),
    "layer_types": gemma2.causal_lm(
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        num_hidden_layers=3,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        golden=False,
    ),
    "classifier": gemma2.classifier(pad_token_id=0, golden=False),
}
