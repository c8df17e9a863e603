"""Tiny models of wav2vec 2.0."""

from golden.case import Family
from golden.sizes import AUDIO

wav2vec2 = Family("Wav2Vec2", AUDIO)
STABLE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}

CASES = {
    "ctc": wav2vec2.case("ForCTC"),
    "stable": wav2vec2.case("ForCTC", **STABLE, num_conv_pos_embeddings=5, feat_extract_activation="relu"),
    "base": wav2vec2.case("Model", **STABLE),
    # The file contains the vector of masked frames, which is not needed.
    "mixed": wav2vec2.case("Model", golden=False, feat_extract_norm="layer", mask_time_prob=0.05),
}
