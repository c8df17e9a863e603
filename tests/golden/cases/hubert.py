"""Tiny models of HuBERT."""

from golden.case import Family
from golden.sizes import AUDIO

hubert = Family("Hubert", AUDIO)

CASES = {
    "ctc": hubert.case("ForCTC", feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True),
    "batch": hubert.case("ForCTC", conv_pos_batch_norm=True, feat_proj_layer_norm=False),
    "base": hubert.case("Model"),
}
