"""Tiny models of Whisper."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "num_mel_bins": 5,
    "max_source_positions": 7,
    "max_target_positions": 61,
    "d_model": 12,
    "encoder_layers": 2,
    "encoder_ffn_dim": 19,
    "encoder_attention_heads": 3,
    "decoder_layers": 2,
    "decoder_ffn_dim": 19,
    "decoder_attention_heads": 3,
    "decoder_start_token_id": 2,
    "begin_suppress_tokens": None,
}
OTHER = {"decoder_layers": 1, "activation_function": "relu", "tie_word_embeddings": False, "scale_embedding": True}

CASES = {
    "lm": Case("WhisperForConditionalGeneration", "WhisperConfig", SIZES),
    "other": Case("WhisperForConditionalGeneration", "WhisperConfig", SIZES | OTHER, golden=False),
}
