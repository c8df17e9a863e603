"""ViT: image patches with a class token in front, pre-norm encoder, learned positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer.config._model import TransformerConfig
from transformer.config._parts import Patches
from transformer.nn.models._vision import VisionClassifier
from transformer.zoo._bert import LAYER_FIELDS
from transformer.zoo._family import Family, Head, Variant
from transformer.zoo._fields import Codec, FieldError, Labels, Unread, training_fields
from transformer.zoo.weights._rules import Relation, Row, Rule, Shape, linear, modules, norm


@dataclass(frozen=True)
class Convolution(Relation):
    """A convolution kernel: (*sizes, channels, D) in Flax, (D, channels, *sizes) in PyTorch."""

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [(features, channels, *sides) for *sides, channels, features in shapes]

    def load(self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [np.moveaxis(tensor, (0, 1), (-1, -2)) for tensor in tensors]

    def save(self, parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.moveaxis(parameter, (-1, -2), (0, 1)) for parameter in parameters]


@dataclass(frozen=True)
class PatchSizes(Codec):
    """Sizes of images and patches, each one number or (height, width). Patches must be square."""

    names = ("image_size", "patch_size", "num_channels")

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        height, width = _pair(values.get("image_size", 224))
        size, other = _pair(values.get("patch_size", 16))
        if size != other:
            raise FieldError(f"patch_size is {values['patch_size']}, but only square patches are supported")
        channels = values.get("num_channels", 3)
        patches = Patches(image_height=height, image_width=width, patch_size=size, channels=channels)
        return {"input": patches, "max_length": 1 + patches.count}

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
    """Whether queries, keys and values have a bias. The output map of attention always has one."""

    names = ("qkv_bias",)

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        return {"attention.biases": None if values.get("qkv_bias", True) else ("out",)}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        return {"qkv_bias": config.attention.biases is None or "query" in config.attention.biases}


def _rules(config: TransformerConfig) -> Sequence[Rule]:
    embeddings = "vit.embeddings."
    return [
        Rule(f"{embeddings}cls_token", "class_token", Row(2)),
        Rule(f"{embeddings}position_embeddings", "encoder/position_table", Row(1)),
        *linear(f"{embeddings}patch_embeddings.projection", "patch_embedding", Convolution()),
        *modules("vit.encoder.layer.{layer}.", "encoder/{layer}/", _LAYER),
        *norm("vit.layernorm", "encoder/final_norm"),
        *linear("classifier", "output"),
    ]


_LAYER = {
    "attention_norm": "layernorm_before",
    "self_attention/query": "attention.attention.query",
    "self_attention/key": "attention.attention.key",
    "self_attention/value": "attention.attention.value",
    "self_attention/out": "attention.output.dense",
    "feed_forward_norm": "layernorm_after",
    "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense",
}


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
    constants={"norm": "layer_norm", "position": "learned", "embedding.scale": False, "output.pooling": "first"},
    fields=(
        *LAYER_FIELDS,
        *training_fields("hidden_dropout_prob", "attention_probs_dropout_prob"),
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
