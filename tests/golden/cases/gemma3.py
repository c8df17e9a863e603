"""Tiny models of Gemma 3 with images."""

from golden.case import MARKER, Family
from golden.cases.gemma3_text import ROTARY, gemma3
from golden.sizes import TOWER

text = gemma3.sizes | {"num_hidden_layers": 3, "rope_parameters": ROTARY}
images = Family(
    "Gemma3",
    {
        "text_config": text | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": TOWER | {"image_size": 12, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": MARKER,
    },
)

CASES = {
    "lm": images.seq2seq(left_padding=True),
    "one_token": images.seq2seq(
        left_padding=True,
        golden=False,
        mm_tokens_per_image=1,
        text_config=text | {"num_hidden_layers": 1, "attention_bias": True},
        vision_config=TOWER | {"image_size": 9, "hidden_act": "gelu", "layer_norm_eps": 0.01},
        tie_word_embeddings=False,
    ),
}
