"""Tiny models of PaliGemma 1 and 2."""

from golden.case import MARKER, Family
from golden.sizes import DECODER, TOWER

text = DECODER | {"head_dim": 4, "model_type": "gemma"}
paligemma = Family(
    "PaliGemma",
    {
        "text_config": text,
        "vision_config": TOWER | {"image_size": 6, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": MARKER,
        "projection_dim": 12,
        "hidden_size": 12,
    },
)

CASES = {
    "one": paligemma.seq2seq(left_padding=True),
    # A window that is shorter than the prefix.
    "two": paligemma.seq2seq(
        left_padding=True, text_config=text | {"model_type": "gemma2", "sliding_window": 3, "query_pre_attn_scalar": 61}
    ),
}
