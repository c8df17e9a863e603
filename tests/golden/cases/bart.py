"""Tiny models of BART."""

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
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
SCALED = SIZES | {"scale_embedding": True, "decoder_layers": 1, "activation_function": "relu"}

CASES = {
    "lm": Case("BartForConditionalGeneration", "BartConfig", SIZES, left_padding=False),
    "scaled": Case("BartForConditionalGeneration", "BartConfig", SCALED, left_padding=False, golden=False),
}
