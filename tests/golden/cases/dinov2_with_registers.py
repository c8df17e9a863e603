"""Tiny models of DINOv2 with registers."""

from golden.case import Family
from golden.cases.dinov2 import layers

registers = Family(
    "Dinov2WithRegisters",
    layers | {"image_size": 9, "patch_size": 3, "mlp_ratio": 2, "layerscale_value": 0.7, "num_register_tokens": 2},
)

CASES = {
    "base": registers.case("Model"),
    "classifier": registers.case("ForImageClassification", num_labels=5, use_swiglu_ffn=True, qkv_bias=False),
    # More registers than patches; the last two rows and columns of pixels belong to no patch.
    "remainder": registers.case("Model", image_size=8, golden=False, num_register_tokens=5, num_channels=1),
}
