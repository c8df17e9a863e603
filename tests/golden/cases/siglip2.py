"""Tiny models of SigLIP 2 with images of any aspect ratio."""

from golden.case import Family
from golden.sizes import ENCODER

# Texts always have the full length, so that the last position exists: 11 as in all cases.
text = ENCODER | {"vocab_size": 37, "max_position_embeddings": 11}
image = ENCODER | {"hidden_size": 10, "num_attention_heads": 2, "num_patches": 9, "patch_size": 3}
siglip2 = Family("Siglip2", {"text_config": text | {"projection_size": 10}, "vision_config": image})

CASES = {
    "dual": siglip2.case("Model", left_padding=False),
    "other": siglip2.case(
        "Model",
        left_padding=False,
        golden=False,
        text_config=text | {"num_hidden_layers": 1, "hidden_act": "gelu"},
        vision_config=image | {"hidden_size": 12, "num_attention_heads": 3, "num_patches": 4, "layer_norm_eps": 0.01},
    ),
}
