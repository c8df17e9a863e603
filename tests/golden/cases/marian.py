"""Tiny models of Marian."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "max_position_embeddings": 61,
    "d_model": 12,
    "encoder_layers": 2,
    "encoder_ffn_dim": 19,
    "encoder_attention_heads": 3,
    "decoder_layers": 2,
    "decoder_ffn_dim": 19,
    "decoder_attention_heads": 3,
    "activation_function": "swish",
    "scale_embedding": True,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
TWO = SIZES | {"share_encoder_decoder_embeddings": False, "vocab_size": 41, "decoder_vocab_size": 37}

CASES = {
    "lm": Case("MarianMTModel", "MarianConfig", SIZES, left_padding=False),
    "two_tables": Case(
        "MarianMTModel", "MarianConfig", TWO | {"scale_embedding": False}, left_padding=False, golden=False
    ),
}
