"""ViT: images cut into patches, a class token in front, a pre-norm encoder with learned positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer.config._model import TransformerConfig
from transformer.config._parts import Patches
from transformer.nn.models._vision import VisionClassifier
from transformer.zoo._family import Family, Head, Variant
from transformer.zoo._fields import ACTIVATIONS, Codec, Field, FieldError, Labels, Unread
from transformer.zoo.weights._rules import MERGED, Relation, Row, Rule, Shape, linear, norm


@dataclass(frozen=True)
class Convolution(Relation):
    """A kernel (*sizes, channels, D), such as the map of patches, is the one (D, channels, *sizes) of a convolution."""

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [(features, channels, *sides) for *sides, channels, features in shapes]

    def load(self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [np.moveaxis(tensor, (0, 1), (-1, -2)) for tensor in tensors]

    def save(self, parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.moveaxis(parameter, (-1, -2), (0, 1)) for parameter in parameters]


@dataclass(frozen=True)
class PatchSizes(Codec):
    """Sizes of images and patches, one number or (height, width); patches must be square."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("image_size", "patch_size", "num_channels")

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        height, width = _pair(values.get("image_size", 224))
        size, other = _pair(values.get("patch_size", 16))
        if size != other:
            raise FieldError(f"patch_size is {values['patch_size']}, but only square patches are built here")
        channels = values.get("num_channels", 3)
        patches = Patches(image_height=height, image_width=width, patch_size=size, channels=channels)
        return {"patches": patches, "max_length": 1 + patches.count}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        patches = config.patches
        if patches is None:
            return {}
        sides = [patches.image_height, patches.image_width]
        size = sides[0] if sides[0] == sides[1] else sides
        return {"image_size": size, "patch_size": patches.patch_size, "num_channels": patches.channels}


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return height, width


@dataclass(frozen=True)
class InputBiases(Codec):
    """Whether queries, keys and values have a bias; the map behind attention always has one."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("qkv_bias",)

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        return {"attention_biases": None if values.get("qkv_bias", True) else ("out",)}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        return {"qkv_bias": config.attention_biases is None or "query" in config.attention_biases}


def _rules(config: TransformerConfig) -> Sequence[Rule]:
    embeddings, layer, ours = "vit.embeddings.", "vit.encoder.layer.{layer}.", "encoder/{layer}/"
    return [
        Rule(f"{embeddings}cls_token", "class_token", Row(2)),
        Rule(f"{embeddings}position_embeddings", "encoder/position_table", Row(1)),
        *linear(f"{embeddings}patch_embeddings.projection", "patch_embedding", Convolution()),
        *norm(f"{layer}layernorm_before", f"{ours}attention_norm"),
        *linear(f"{layer}attention.attention.query", f"{ours}self_attention/query"),
        *linear(f"{layer}attention.attention.key", f"{ours}self_attention/key"),
        *linear(f"{layer}attention.attention.value", f"{ours}self_attention/value"),
        *linear(f"{layer}attention.output.dense", f"{ours}self_attention/out", MERGED),
        *norm(f"{layer}layernorm_after", f"{ours}feed_forward_norm"),
        *linear(f"{layer}intermediate.dense", f"{ours}feed_forward/up"),
        *linear(f"{layer}output.dense", f"{ours}feed_forward/down"),
        *norm("vit.layernorm", "encoder/final_norm"),
        *linear("classifier", "output"),
    ]


def _variant(name: str, parameters: int, image_size: int, patch_size: int) -> Variant:
    fields = {"image_size": image_size, "patch_size": patch_size, "num_labels": 1000}
    if "large" in name:
        fields |= {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return Variant(hub=f"google/{name}", parameters=parameters, fields=fields)


VIT = Family(
    name="vit",
    title="ViT",
    citation="Dosovitskiy et al. 2020, arXiv 2010.11929",
    heads={"ViTForImageClassification": Head(model=VisionClassifier)},
    constants={"norm": "layer_norm", "position": "learned", "scale_embeddings": False, "pooling": "first"},
    fields=(
        Field("hidden_size", "d_model", 768),
        Field("num_hidden_layers", "num_layers", 12),
        Field("num_attention_heads", "num_heads", 12),
        Field("intermediate_size", "d_ff", 3072),
        Field("hidden_act", "activation", "gelu", ACTIVATIONS),
        Field("layer_norm_eps", "norm_epsilon", 1e-12),
        Field("hidden_dropout_prob", "dropout_rate", 0.0),
        Field("attention_probs_dropout_prob", "attention_dropout_rate", 0.0),
        Field("initializer_range", "initializer_range", 0.02),
        InputBiases(),
        PatchSizes(),
        Labels(),
        Unread(("encoder_stride", "pooler_output_size", "pooler_act")),
    ),
    rules=_rules,
    prefix="vit.",
    ignored=(r"(vit\.)?pooler\.dense\.(weight|bias)", r"(vit\.)?embeddings\.mask_token"),
    variants={
        "vit-base-patch16-224": _variant("vit-base-patch16-224", 86_567_656, 224, 16),
        "vit-base-patch16-384": _variant("vit-base-patch16-384", 86_859_496, 384, 16),
        "vit-base-patch32-384": _variant("vit-base-patch32-384", 88_297_192, 384, 32),
        "vit-large-patch16-224": _variant("vit-large-patch16-224", 304_326_632, 224, 16),
        "vit-large-patch16-384": _variant("vit-large-patch16-384", 304_715_752, 384, 16),
        "vit-large-patch32-384": _variant("vit-large-patch32-384", 306_632_680, 384, 32),
    },
)
