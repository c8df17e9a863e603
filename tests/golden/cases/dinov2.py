"""Tiny models of DINOv2."""

from golden.case import Family
from golden.sizes import ENCODER

layers = {name: size for name, size in ENCODER.items() if name != "intermediate_size"}
dinov2 = Family(
    "Dinov2",
    layers | {"image_size": 9, "patch_size": 3, "mlp_ratio": 2, "layerscale_value": 0.7, "use_mask_token": False},
)

CASES = {
    "base": dinov2.case("Model"),
    "classifier": dinov2.case("ForImageClassification", num_labels=5, use_swiglu_ffn=True, qkv_bias=False),
    # The last two rows and columns of pixels belong to no patch, and the token for masked patches is not needed.
    "remainder": dinov2.case("Model", image_size=11, golden=False, hidden_act="relu", use_mask_token=True),
}
