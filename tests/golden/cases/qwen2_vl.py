"""Tiny models of Qwen2-VL."""

from golden.case import MARKER, Family
from golden.sizes import DECODER

SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 2, 1]}
text = DECODER | {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": SECTIONS}
vision = {
    "embed_dim": 16,
    "hidden_size": 24,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 3,
    "spatial_merge_size": 2,
}
SPECIAL = {"image_token_id": MARKER, "video_token_id": 36, "vision_start_token_id": 35, "vision_end_token_id": 34}
qwen2_vl = Family("Qwen2VL", {"text_config": text, "vision_config": vision, **SPECIAL})

CASES = {
    "lm": qwen2_vl.seq2seq(left_padding=False),
    "tied": qwen2_vl.seq2seq(
        golden=False,
        tie_word_embeddings=True,
        text_config=text | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        vision_config=vision | {"spatial_merge_size": 1, "temporal_patch_size": 1, "in_channels": 1},
    ),
}
