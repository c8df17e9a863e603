"""Tiny models of ViT."""

from golden.case import Case

SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "image_size": 9,
    "patch_size": 3,
    "num_labels": 5,
}

CASES = {
    "classifier": Case("ViTForImageClassification", "ViTConfig", SIZES),
    "oblong": Case(
        "ViTForImageClassification",
        "ViTConfig",
        SIZES | {"image_size": [6, 14], "patch_size": 2, "num_channels": 1, "qkv_bias": False, "hidden_act": "relu"},
    ),
}
