"""Tiny models of ViT."""

from golden.case import Family
from golden.sizes import ENCODER

vit = Family("ViT", ENCODER | {"image_size": 9, "patch_size": 3, "num_labels": 5})
OBLONG = {"image_size": [6, 14], "patch_size": 2, "num_channels": 1}

CASES = {
    "classifier": vit.case("ForImageClassification"),
    "oblong": vit.case("ForImageClassification", **OBLONG, qkv_bias=False, hidden_act="relu"),
    "base": vit.case("Model", num_labels=2),
}
