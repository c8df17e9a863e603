"""ViT: image patches with a class token in front, pre-norm encoder, learned positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transformer.config._model import TransformerConfig
from transformer.config._parts import Patches
from transformer.config._positions import LearnedOptions
from transformer.nn.models._vision import VisionClassifier, VisionEmbedder
from transformer.zoo._family import LAYER_NORM, Family, Head, variants
from transformer.zoo._fields import LARGE, Codec, Converted, FieldError, Fields, Fixed, Labels, Unread, training_fields
from transformer.zoo.families._bert import LAYER_FIELDS, TANH_POOLER
from transformer.zoo.weights._rules import EachTensor, Relation, Rule, WithUnread, linear, modules, norm, row

CONVOLUTION = EachTensor(
    lambda shape: (shape[-1], shape[-2], *shape[:-2]),
    lambda tensor, shape: np.moveaxis(tensor, (0, 1), (-1, -2)),
    lambda parameter: np.moveaxis(parameter, (-1, -2), (0, 1)),
)
"""A convolution kernel: (*sizes, channels, D) in Flax, (D, channels, *sizes) in PyTorch."""


def class_and_mask(axes: int) -> Relation:
    """Return the relation of a class token to its tensor, and to a token for masked patches.

    Only pretraining uses the latter, with `axes` leading axes of size 1, but the reference expects it in files. It is
    not loaded, and saved as zeros.
    """
    return WithUnread(lambda token: np.zeros((*(1,) * axes, *token.shape), token.dtype), row(2))


@dataclass(frozen=True)
class PatchSizes(Codec):
    """Sizes of images and patches, each one number or (height, width). Patches must be square."""

    patch_size: int = 16
    """Default if config.json omits the size of patches."""
    use_bias: bool = True
    class_token: bool = True
    distillation_token: bool = False
    registers: int | None = None
    """Default number of registers if config.json omits it; None: the family has no registers."""

    @property
    def names(self) -> tuple[str, ...]:
        fields = ("image_size", "patch_size", "num_channels")
        return fields if self.registers is None else (*fields, "num_register_tokens")

    def read(self, values: Fields, changes: Fields) -> Fields:
        height, width = _pair(values.get("image_size", 224))
        size, other = _pair(values.get("patch_size", self.patch_size))
        if size != other:
            raise FieldError(f"patch_size is {values['patch_size']}, but only square patches are supported")
        registers = 0 if self.registers is None else values.get("num_register_tokens", self.registers)
        if self.registers is not None and registers == 0:
            raise FieldError("num_register_tokens is 0, but models of this family without registers are not supported")
        patches = Patches(
            image_height=height,
            image_width=width,
            patch_size=size,
            channels=values.get("num_channels", 3),
            use_bias=self.use_bias,
            class_token=self.class_token,
            distillation_token=self.distillation_token,
            registers=registers,
            drop_remainder=bool(height % size or width % size),  # as a convolution without padding
        )
        return {"input": patches}

    def write(self, config: TransformerConfig) -> Fields:
        patches = config.patches
        if patches is None:
            return {}
        sides = [patches.image_height, patches.image_width]
        size = sides[0] if sides[0] == sides[1] else sides
        values = {"image_size": size, "patch_size": patches.patch_size, "num_channels": patches.channels}
        return values if self.registers is None else values | {"num_register_tokens": patches.registers}


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return height, width


INPUT_BIASES = Converted(
    "qkv_bias",
    True,
    lambda biased, changes: {"attention.biases": None if biased else ("out",)},
    lambda config: config.attention.biases is None or "query" in config.attention.biases,
)
"""Whether queries, keys and values have a bias. The output map of attention always has one."""


def vit_rules(prefix: str, layer: Mapping[str, str]) -> list[Rule]:
    """Return the rules of ViT and families with the same tensor names, without a head; `layer` is for `modules`."""
    embeddings = f"{prefix}embeddings."
    return [
        Rule(f"{embeddings}cls_token", "class_token", row(2)),
        Rule(f"{embeddings}distillation_token", "distillation_token", row(2)),
        Rule(f"{embeddings}position_embeddings", "encoder/position_table", row(1)),
        *linear(f"{embeddings}patch_embeddings.projection", "patch_embedding", CONVOLUTION),
        *modules(f"{prefix}encoder.layer.{{layer}}.", "encoder/{layer}/", layer),
        *norm(f"{prefix}layernorm", "encoder/final_norm"),
    ]


VIT_LAYER = {
    "attention_norm": "layernorm_before",
    **{f"self_attention/{name}": f"attention.attention.{name}" for name in ("query", "key", "value")},
    "self_attention/out": "attention.output.dense",
    "feed_forward_norm": "layernorm_after",
    "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense",
}

VIT_CONSTANTS = LAYER_NORM | {"position": LearnedOptions(), "output.pooling": "first"}
"""Constants of ViT and families derived from it."""

POOLER = (r"(\w+\.)?pooler\.dense\.(weight|bias)", r"(\w+\.)?embeddings\.mask_token")
"""Tensors that a classifier does not need."""


def vit_fields(*, distillation_token: bool = False) -> tuple[Codec, ...]:
    """Return the fields of ViT and DeiT."""
    return (
        *LAYER_FIELDS,
        *training_fields("hidden_dropout_prob", "attention_probs_dropout_prob"),
        INPUT_BIASES,
        PatchSizes(distillation_token=distillation_token),
        Unread(("encoder_stride",)),
    )


def vit_classifier(model: type, **outputs: str) -> Head:
    """Return a classifier of images; `outputs` are its output layers: parameter path -> name of the tensors."""
    rules = tuple(rule for ours, theirs in outputs.items() for rule in linear(theirs, ours))
    unread = Unread(("pooler_output_size", "pooler_act"))
    return Head(model=model, fields=(Labels(), unread), rules=rules, ignored=POOLER)


def vit_base(prefix: str, heads: tuple[str, ...]) -> Head:
    """Return the model without a classifier: the pooler's tanh of the class token."""
    return Head(
        model=VisionEmbedder,
        constants={"output.transform": TANH_POOLER},
        fields=(Fixed("pooler_act", ("tanh",)), Unread(("pooler_output_size",))),
        rules=tuple(linear(f"{prefix}pooler.dense", "head_transform/dense")),
        base=True,
        ignored=(POOLER[1], *(rf"{head}\.(weight|bias)" for head in heads)),
    )


_VARIANTS = {
    "vit-base-patch16-224": (86_567_656, 224, 16),
    "vit-base-patch16-384": (86_859_496, 384, 16),
    "vit-base-patch32-384": (88_297_192, 384, 32),
    "vit-large-patch16-224": (304_326_632, 224, 16, LARGE),
    "vit-large-patch16-384": (304_715_752, 384, 16, LARGE),
    "vit-large-patch32-384": (306_632_680, 384, 32, LARGE),
}

VIT = Family(
    name="vit",
    title="ViT",
    citation="Dosovitskiy et al. 2020, arXiv 2010.11929",
    heads={
        "ViTForImageClassification": vit_classifier(VisionClassifier, output="classifier"),
        "ViTModel": vit_base("vit.", ("classifier",)),
    },
    constants=VIT_CONSTANTS,
    fields=vit_fields(),
    rules=vit_rules("vit.", VIT_LAYER),
    prefix="vit.",
    variants=variants("google/", _VARIANTS, ("image_size", "patch_size"), num_labels=1000),
)
