"""Tiny models of Blenderbot."""

from golden.case import Case

SIZES = {
    "vocab_size": 37,
    "max_position_embeddings": 61,
    "d_model": 12,
    "encoder_layers": 2,
    "encoder_ffn_dim": 19,
    "encoder_attention_heads": 3,
    "decoder_layers": 3,
    "decoder_ffn_dim": 19,
    "decoder_attention_heads": 3,
    "scale_embedding": True,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}

CASES = {
    "lm": Case("BlenderbotForConditionalGeneration", "BlenderbotConfig", SIZES, left_padding=False),
    "unscaled": Case(
        "BlenderbotForConditionalGeneration",
        "BlenderbotConfig",
        SIZES | {"scale_embedding": False, "activation_function": "relu"},
        left_padding=False,
        golden=False,
    ),
}
