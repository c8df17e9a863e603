"""DINOv2: ViT with LayerScale and optionally with SwiGLU; its classifier reads the class token and the mean of patches.

With registers (Darcet et al. 2023), learned tokens without a position follow the class token.
"""

from __future__ import annotations

import math
from dataclasses import replace

from transformer.config._model import TransformerConfig
from transformer.nn.models._vision import VisionClassifier, VisionEmbedder
from transformer.zoo._family import Family, Head, variants
from transformer.zoo._fields import ACTIVATIONS, Codec, Field, Fields, Labels, Unread, sizes, training_fields
from transformer.zoo.families._vit import INPUT_BIASES, VIT_CONSTANTS, VIT_LAYER, PatchSizes, class_and_mask, vit_rules
from transformer.zoo.weights._rules import VECTOR, Fused, Rule, linear, row

_ACTIVATION = Field("hidden_act", "feed_forward.activation", "gelu", ACTIVATIONS)


class FeedForwardRatio(Codec):
    """Inner width of the feed-forward layers as a multiple of d_model, and SwiGLU with two thirds of it."""

    names = ("mlp_ratio", "use_swiglu_ffn", "hidden_act")

    def read(self, values: Fields, changes: Fields) -> Fields:
        width = int(changes["d_model"] * values.get("mlp_ratio", 4))
        if values.get("use_swiglu_ffn", False):
            # The reference rounds two thirds up to a multiple of 8. It always uses silu, whatever hidden_act is.
            return {
                "feed_forward.d_ff": (int(width * 2 / 3) + 7) // 8 * 8,
                "feed_forward.gated": True,
                "feed_forward.activation": "silu",
            }
        activation = _ACTIVATION.read(values, changes)
        return {"feed_forward.d_ff": width, "feed_forward.gated": False, **activation}

    def write(self, config: TransformerConfig) -> Fields:
        width = config.feed_forward_width
        if config.feed_forward.gated:
            return {"mlp_ratio": _ratio(math.ceil(width * 3 / 2), config.d_model), "use_swiglu_ffn": True}
        act = _ACTIVATION.write(config)
        return {"mlp_ratio": _ratio(width, config.d_model), "use_swiglu_ffn": False} | act


def _ratio(width: int, d_model: int) -> float:
    """Return a ratio with int(d_model * ratio) = width; in floating point, the quotient may be a little too small."""
    if width % d_model == 0:  # newer releases of the reference accept only integers
        return width // d_model
    ratio = width / d_model
    return ratio if int(d_model * ratio) == width else math.nextafter(ratio, math.inf)


def _rules(config: TransformerConfig, prefix: str = "dinov2.") -> list[Rule]:
    layer, ours = f"{prefix}encoder.layer.{{layer}}.", "encoder/{layer}/"
    names = {"attention_norm": "norm1", "feed_forward_norm": "norm2"}
    names |= {"feed_forward/up": "mlp.fc1", "feed_forward/down": "mlp.fc2"}
    if config.feed_forward.gated:
        del names["feed_forward/up"]
        names["feed_forward/down"] = "mlp.weights_out"
    parts = tuple(f"{ours}feed_forward/{name}" for name in ("gate", "up"))
    attention = {path: name for path, name in VIT_LAYER.items() if path.startswith("self_attention")}
    return [
        *vit_rules(prefix, attention | names),
        Rule(f"{layer}layer_scale1.lambda1", f"{ours}attention_scale"),
        Rule(f"{layer}layer_scale2.lambda1", f"{ours}feed_forward_scale"),
        Rule(f"{layer}mlp.weights_in.weight", tuple(f"{part}/kernel" for part in parts), Fused()),
        Rule(f"{layer}mlp.weights_in.bias", tuple(f"{part}/bias" for part in parts), Fused(each=VECTOR)),
    ]


def _fields(patches: PatchSizes, *fields: Codec) -> tuple[Codec, ...]:
    """Return the fields of DINOv2 with and without registers, which `patches` and `fields` complete."""
    return (
        *sizes(d_model=("hidden_size", 768), num_layers=("num_hidden_layers", 12)),
        *sizes(num_heads=("num_attention_heads", 12)),
        FeedForwardRatio(),
        Field("layer_norm_eps", "norm.epsilon", 1e-6),
        Field("layerscale_value", "stack.layer_scale", 1.0),
        *training_fields("hidden_dropout_prob", "attention_probs_dropout_prob"),
        INPUT_BIASES,
        patches,
        Unread(
            ("drop_path_rate", "apply_layernorm", "reshape_hidden_states", "out_features", "out_indices", "stage_names")
        ),
        *fields,
    )


def _heads(name: str) -> dict[str, Head]:
    """Return the heads of the classes whose names start with `name`."""
    classifier = Head(
        model=VisionClassifier,
        constants={"output.pooling": "first_and_mean"},
        fields=(Labels(),),
        rules=tuple(linear("classifier", "output")),
    )
    base = Head(model=VisionEmbedder, base=True, ignored=(r"classifier\.(weight|bias)",))
    return {f"{name}ForImageClassification": classifier, f"{name}Model": base}


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_ALIKE = {"image_size": 518, "patch_size": 14, "use_swiglu_ffn": False}
_VARIANTS = {
    "small": (22_056_192, 384, 12, 6),
    "base": (86_579_712, 768, 12, 12),
    "large": (304_367_616, 1024, 24, 16),
    "giant": (1_136_479_232, 1536, 40, 24, {"use_swiglu_ffn": True}),
}

DINOV2 = Family(
    name="dinov2",
    title="DINOv2",
    citation="Oquab et al. 2023, arXiv 2304.07193",
    heads=_heads("Dinov2"),
    constants=VIT_CONSTANTS,
    fields=_fields(PatchSizes(patch_size=14), Unread(("use_mask_token",), written={"use_mask_token": False})),
    rules=_rules,
    prefix="dinov2.",
    any_image_size=True,
    ignored=(r"(dinov2\.)?embeddings\.mask_token",),
    variants=variants(
        "facebook/", {f"dinov2-{size}": row for size, row in _VARIANTS.items()}, _SIZES, "Dinov2Model", **_ALIKE
    ),
)


def _rules_with_registers(config: TransformerConfig) -> list[Rule]:
    prefix = "dinov2_with_registers."
    tokens = (f"{prefix}embeddings.cls_token", f"{prefix}embeddings.mask_token")
    rules = [rule for rule in _rules(config, prefix) if rule.parameters != "class_token"]
    registers = Rule(f"{prefix}embeddings.register_tokens", "registers", row(1))
    return [*rules, Rule(tokens, "class_token", class_and_mask(1)), registers]


_WITH_REGISTERS = {
    f"dinov2-with-registers-{size}": (parameters + 4 * width, width, *others)
    for size, (parameters, width, *others) in _VARIANTS.items()
}

DINOV2_WITH_REGISTERS = replace(
    DINOV2,
    name="dinov2_with_registers",
    title="DINOv2 with registers",
    citation="Darcet et al. 2023, arXiv 2309.16588",
    heads=_heads("Dinov2WithRegisters"),
    fields=_fields(PatchSizes(patch_size=16, registers=4)),
    rules=_rules_with_registers,
    prefix="dinov2_with_registers.",
    antialias=True,
    ignored=(),
    variants=variants("facebook/", _WITH_REGISTERS, _SIZES, "Dinov2WithRegistersModel", **_ALIKE),
)
