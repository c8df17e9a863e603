"""Tiny models of Qwen2.5-VL."""

from golden.case import Family
from golden.cases.qwen2_vl import SPECIAL, text

vision = {
    "hidden_size": 16,
    "out_hidden_size": 24,
    "intermediate_size": 19,
    "depth": 4,
    "num_heads": 2,
    "patch_size": 3,
    "spatial_merge_size": 2,
    "window_size": 12,
    "fullatt_block_indexes": [1, 3],
}
qwen2_5_vl = Family("Qwen2_5_VL", {"text_config": text, "vision_config": vision, **SPECIAL})

CASES = {
    "lm": qwen2_5_vl.seq2seq(left_padding=False),
    "windows": qwen2_5_vl.seq2seq(
        golden=False,
        tie_word_embeddings=True,
        vision_config=vision | {"window_size": 7, "fullatt_block_indexes": [2], "hidden_act": "gelu", "in_channels": 1},
    ),
}
