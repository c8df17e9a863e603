"""Tiny models of Marian."""

from golden.case import Family
from golden.cases.bart import SIZES

marian = Family("Marian", SIZES | {"activation_function": "swish", "scale_embedding": True, "pad_token_id": 0})
TWO = {"share_encoder_decoder_embeddings": False, "vocab_size": 41, "decoder_vocab_size": 37}

CASES = {
    "lm": marian.case("MTModel", left_padding=False),
    "unlike": marian.case("MTModel", left_padding=False, golden=False, decoder_ffn_dim=7, decoder_attention_heads=6),
    "two_tables": marian.case("MTModel", **TWO, scale_embedding=False, left_padding=False, golden=False),
}
