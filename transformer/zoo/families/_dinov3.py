"""DINOv3: ViT with registers, LayerScale, and rotary positions by row and column; optionally with SwiGLU."""

from __future__ import annotations

from transformer.config._model import TransformerConfig
from transformer.config._positions import RotaryGridOptions
from transformer.nn.models._vision import VisionEmbedder
from transformer.zoo._family import LAYER_NORM, Family, Head, variants
from transformer.zoo._fields import ACTIVATIONS, Codec, Field, Fields, Unread, sizes
from transformer.zoo.families._vit import CONVOLUTION, PatchSizes, class_and_mask
from transformer.zoo.weights._rules import Rule, linear, modules, norm, row

_BIASES = {"query": "query_bias", "key": "key_bias", "value": "value_bias", "out": "proj_bias"}
_KEY = "key_bias"


class MapBiases(Codec):
    """Which maps have a bias: one field for each map of attention, and one for the feed-forward layers."""

    names = (*_BIASES.values(), "mlp_bias")

    def read(self, values: Fields, changes: Fields) -> Fields:
        # By default, all maps but that of keys have a bias.
        biases = tuple(ours for ours, theirs in _BIASES.items() if values.get(theirs, theirs != _KEY))
        return {"attention.biases": biases, "parameters.use_bias": values.get("mlp_bias", True)}

    def write(self, config: TransformerConfig) -> Fields:
        given = config.attention.biases
        has = {ours: config.parameters.use_bias if given is None else ours in given for ours in _BIASES}
        return {theirs: has[ours] for ours, theirs in _BIASES.items()} | {"mlp_bias": config.parameters.use_bias}


_LAYER, _OURS = "layer.{layer}.", "encoder/{layer}/"
_NAMES = {"attention_norm": "norm1", "feed_forward_norm": "norm2"}
_LETTERS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_NAMES |= {f"self_attention/{name}": f"attention.{letter}_proj" for name, letter in _LETTERS.items()}
_NAMES |= {f"feed_forward/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_RULES = [
    Rule(("embeddings.cls_token", "embeddings.mask_token"), "class_token", class_and_mask(2)),
    Rule("embeddings.register_tokens", "registers", row(1)),
    *linear("embeddings.patch_embeddings", "patch_embedding", CONVOLUTION),
    *modules(_LAYER, _OURS, _NAMES),
    Rule(f"{_LAYER}layer_scale1.lambda1", f"{_OURS}attention_scale"),
    Rule(f"{_LAYER}layer_scale2.lambda1", f"{_OURS}feed_forward_scale"),
    *norm("norm", "encoder/final_norm"),
]

_GATED = {"use_gated_mlp": True, "hidden_act": "silu"}

_VARIANTS = {
    "vits16": (21_596_160, 384, 1536, 12, 6),
    "vits16plus": (28_692_480, 384, 1536, 12, 6, _GATED),
    "vitb16": (85_659_648, 768, 3072, 12, 12),
    "vitl16": (303_128_576, 1024, 4096, 24, 16),
    "vith16plus": (840_591_360, 1280, 5120, 32, 20, _GATED),
    "vit7b16": (6_716_030_976, 4096, 8192, 40, 32, _GATED | {"query_bias": False, "value_bias": False}),
}

DINOV3 = Family(
    name="dinov3_vit",
    title="DINOv3",
    citation="Siméoni et al. 2025, arXiv 2508.10104",
    heads={"DINOv3ViTModel": Head(model=VisionEmbedder, base=True)},
    constants=LAYER_NORM | {"position": RotaryGridOptions(), "output.pooling": "first"},
    fields=(
        *sizes(d_model=("hidden_size", 384), num_layers=("num_hidden_layers", 12)),
        *sizes(num_heads=("num_attention_heads", 6)),
        Field("intermediate_size", "feed_forward.d_ff", 1536),
        Field("hidden_act", "feed_forward.activation", "gelu", ACTIVATIONS),
        Field("use_gated_mlp", "feed_forward.gated", False),
        Field("layer_norm_eps", "norm.epsilon", 1e-5),
        Field("layerscale_value", "stack.layer_scale", 1.0),
        Field("rope_theta", "position.base", 100.0),
        Field("attention_dropout", "attention.dropout_rate", 0.0),
        Field("initializer_range", "parameters.initializer_range", 0.02),
        MapBiases(),
        PatchSizes(registers=0),
        Unread(
            ("drop_path_rate", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale", "apply_layernorm")
            + ("reshape_hidden_states", "out_features", "out_indices", "stage_names")
        ),
    ),
    rules=_RULES,
    old_names={"layer.": "model.layer."},
    any_image_size=True,
    variants=variants(
        "facebook/dinov3-",
        {f"dinov3-{size}": (f"{size}-pretrain-lvd1689m", *row) for size, row in _VARIANTS.items()},
        num_register_tokens=4,
    ),
)
