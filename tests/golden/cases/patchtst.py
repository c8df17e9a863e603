"""Tiny models of PatchTST."""

from golden.case import Case

SIZES = {
    "num_input_channels": 3,
    "context_length": 17,
    "prediction_length": 5,
    "patch_length": 4,
    "patch_stride": 3,
    "d_model": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "ffn_dim": 19,
    "pooling_type": None,
}
TOKEN = {"use_cls_token": True, "share_embedding": False, "norm_type": "layernorm", "pre_norm": False}
LARGEST = {"pooling_type": "max", "pre_norm": False, "bias": False, "activation_function": "relu"}


def case(golden: bool = False, **values: object) -> Case:
    """A model for prediction with these fields."""
    return Case("PatchTSTForPrediction", "PatchTSTConfig", SIZES | values, golden=golden)


CASES = {
    "forecast": case(golden=True),
    "token": case(**TOKEN, scaling="mean"),
    "mean": case(pooling_type="mean", scaling=None, norm_type="layernorm", positional_encoding_type="random"),
    "largest": case(**LARGEST),
}
