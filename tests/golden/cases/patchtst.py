"""Tiny models of PatchTST."""

from golden.case import Family

SERIES = {
    "num_input_channels": 3,
    "context_length": 17,
    "prediction_length": 5,
    "patch_length": 4,
    "patch_stride": 3,
}
LAYERS = {"d_model": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 19, "pooling_type": None}
TOKEN = {"use_cls_token": True, "share_embedding": False, "norm_type": "layernorm", "pre_norm": False}
MEAN = {"pooling_type": "mean", "scaling": None, "norm_type": "layernorm", "positional_encoding_type": "random"}
LARGEST = {"pooling_type": "max", "pre_norm": False, "bias": False, "activation_function": "relu"}

patchtst = Family("PatchTST", SERIES | LAYERS)

TARGETS = {"num_targets": 4, "pooling_type": "mean"}
# Of the three channels, the reference masks the last two patches.
MASKED = {"mask_type": "forecast", "num_forecast_mask_patches": [2]}

CASES = {
    "forecast": patchtst.case("ForPrediction"),
    "token": patchtst.case("ForPrediction", **TOKEN, scaling="mean", golden=False),
    "mean": patchtst.case("ForPrediction", **MEAN, golden=False),
    "largest": patchtst.case("ForPrediction", **LARGEST, golden=False),
    "classifier": patchtst.case("ForClassification", **TARGETS),
    "classifier_token": patchtst.case("ForClassification", **TARGETS | TOKEN, golden=False),
    "regression": patchtst.case("ForRegression", **TARGETS | MEAN | {"pooling_type": "max"}, output_range=[-3, 5]),
    "unlimited": patchtst.case("ForRegression", **TARGETS, golden=False),
    "pretraining": patchtst.case("ForPretraining", **MASKED),
    "pretraining_token": patchtst.case("ForPretraining", **MASKED | TOKEN, golden=False),
    "base": patchtst.case("Model"),
}
