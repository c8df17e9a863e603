"""Tiny models of BART."""

from golden.case import Family
from golden.sizes import SEQ2SEQ

SIZES = SEQ2SEQ | {"max_position_embeddings": 61, "decoder_start_token_id": 2, "forced_eos_token_id": None}

bart = Family("Bart", SIZES)

CASES = {
    "lm": bart.seq2seq(),
    "unlike": bart.seq2seq(encoder_ffn_dim=23, encoder_attention_heads=2),
    "scaled": bart.seq2seq(scale_embedding=True, decoder_layers=1, activation_function="relu", golden=False),
}
