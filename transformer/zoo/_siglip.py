"""SigLIP: encoders of texts and images, trained with a sigmoid per pair; images are pooled by attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer.config._model import TransformerConfig
from transformer.nn.models._dual import DualEncoder
from transformer.zoo._clip import DUAL_CONSTANTS, TwoConfigs, dual_rules, encoder_fields, text_fields
from transformer.zoo._family import Family, Head, Variant
from transformer.zoo._fields import Fixed, Unread
from transformer.zoo._vit import PatchSizes
from transformer.zoo.weights._rules import MERGED, VECTOR, Fused, Row, Rule, linear, modules


def _rules(config: TransformerConfig) -> Sequence[Rule]:
    head, ours = "vision_model.head.", "image/attention_pooling/"
    parts = tuple(f"{ours}cross_attention/{name}" for name in ("query", "key", "value"))
    names = {"feed_forward_norm": "layernorm", "feed_forward/up": "mlp.fc1", "feed_forward/down": "mlp.fc2"}
    return [
        *dual_rules(),
        *linear("text_model.head", "text_projection"),
        Rule(f"{head}probe", f"{ours}query", Row(2)),
        Rule(f"{head}attention.in_proj_weight", tuple(f"{part}/kernel" for part in parts), Fused()),
        Rule(f"{head}attention.in_proj_bias", tuple(f"{part}/bias" for part in parts), Fused(each=VECTOR)),
        *linear(f"{head}attention.out_proj", f"{ours}cross_attention/out", MERGED),
        *modules(head, ours, names),
        Rule("logit_scale", "logit_scale"),
        Rule("logit_bias", "logit_bias"),
    ]


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}


def _variant(name: str, parameters: int, image: dict[str, Any], layers: dict[str, Any] | None = None) -> Variant:
    layers = layers or {}
    fields = {"text_config": layers, "vision_config": layers | image}
    return Variant(hub=f"google/{name}", parameters=parameters, fields=fields)


SIGLIP = Family(
    name="siglip",
    title="SigLIP",
    citation="Zhai et al. 2023, arXiv 2303.15343",
    heads={"SiglipModel": Head(model=DualEncoder)},
    constants=DUAL_CONSTANTS,
    fields=(
        TwoConfigs(
            text=(
                *encoder_fields(768, 12, 3072, "gelu_pytorch_tanh", 1e-6, ("projection_size",)),
                *text_fields(32_000, 64),
            ),
            image=(
                *encoder_fields(768, 12, 3072, "gelu_pytorch_tanh", 1e-6),
                Fixed("vision_use_head", (True,)),
                PatchSizes(class_token=False),
            ),
            constants={"pooling": "attention", "projections": "text", "similarity": "sigmoid"},
            kinds=("siglip_text_model", "siglip_vision_model"),
            features="projection_size",
        ),
        Unread(("initializer_factor", "initializer_range", "tie_word_embeddings")),
    ),
    rules=_rules,
    ignored=(r"(text|vision)_model\.embeddings\.position_ids",),
    variants={
        "siglip-base-patch16-224": _variant("siglip-base-patch16-224", 203_155_970, {"image_size": 224}),
        "siglip-base-patch16-384": _variant("siglip-base-patch16-384", 203_447_810, {"image_size": 384}),
        "siglip-large-patch16-256": _variant("siglip-large-patch16-256", 652_150_786, {"image_size": 256}, _LARGE),
        "siglip-large-patch16-384": _variant("siglip-large-patch16-384", 652_478_466, {"image_size": 384}, _LARGE),
        "siglip-so400m-patch14-384": _variant(
            "siglip-so400m-patch14-384", 877_960_498, {"image_size": 384, "patch_size": 14}, _SO400M
        ),
    },
)
