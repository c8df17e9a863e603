"""Tiny models of CLIP."""

from golden.case import Family
from golden.sizes import ENCODER

text = ENCODER | {"vocab_size": 37, "max_position_embeddings": 13, "eos_token_id": 36, "pad_token_id": 0}
image = ENCODER | {"hidden_size": 10, "num_attention_heads": 2, "image_size": 9, "patch_size": 3}
clip = Family("CLIP", {"text_config": text, "vision_config": image, "projection_dim": 7})
OTHER = {"hidden_act": "gelu", "layer_norm_eps": 0.01}

CASES = {
    "dual": clip.case("Model", left_padding=False),
    "other": clip.case(
        "Model",
        left_padding=False,
        text_config=text | OTHER | {"num_hidden_layers": 3, "eos_token_id": 2},
        vision_config=image | OTHER | {"num_hidden_layers": 1, "num_channels": 1, "intermediate_size": 11},
    ),
}
