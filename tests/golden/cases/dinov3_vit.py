"""Tiny models of DINOv3."""

from golden.case import Family
from golden.sizes import ENCODER

# More rows than columns of patches.
sizes = ENCODER | {"image_size": [12, 9], "patch_size": 3, "layerscale_value": 0.7, "num_register_tokens": 2}
dinov3 = Family("DINOv3ViT", sizes)

CASES = {
    "base": dinov3.case("Model"),
    "gated": dinov3.case(
        "Model", use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False, rope_theta=20.0
    ),
    # The last column of pixels belongs to no patch.
    "remainder": dinov3.case(
        "Model", golden=False, image_size=[3, 16], key_bias=True, proj_bias=False, mlp_bias=False, num_channels=1
    ),
}
