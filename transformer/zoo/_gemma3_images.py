"""Gemma 3 with images: SigLIP, whose patches are averaged to 256 tokens, before the decoder of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from transformer.chat._image_prompts import ImageText
from transformer.config._image_tokens import ImageTokens
from transformer.config._model import TransformerConfig
from transformer.zoo._family import Family, Variant
from transformer.zoo._fields import FieldError, Fixed, Unread
from transformer.zoo._gemma3 import GEMMA3
from transformer.zoo._vision_text import (
    SIGLIP_TOWER,
    VISION_TEXT_FILES,
    TextModel,
    VisionText,
    vision_text_heads,
    vision_text_rules,
)
from transformer.zoo.weights._rules import Rule, norm

_SIZES = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
# The reference caps the logits of the text model alone, but not with images.
_FIELDS = tuple(one for one in GEMMA3.fields if "final_logit_softcapping" not in one.names)
_TEXT = {
    "gemma3_text": TextModel(
        constants=GEMMA3.constants,
        fields=(*_FIELDS, Fixed("final_logit_softcapping", (None,))),
        rules=GEMMA3.rules,
        defaults=_SIZES | {"vocab_size": 262_208},
    )
}


@dataclass(frozen=True, kw_only=True)
class _Images(VisionText):
    """`mm_tokens_per_image`: the number of tokens per image, after averaging squares of patches."""

    own: tuple[str, ...] = ("mm_tokens_per_image",)

    def images(self, values: Mapping[str, Any], text: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
        patches, tokens = image["input"], values.get("mm_tokens_per_image", 256)
        rows, side = patches.image_height // patches.patch_size, isqrt(tokens)
        if patches.image_height != patches.image_width or side < 1 or side**2 != tokens or rows % side:
            raise FieldError(
                f"mm_tokens_per_image is {tokens}, but only the square of a divisor of the {rows} rows of patches of a "
                f"square image is supported"
            )
        windows = [kind.window for name in ("prefix", "period", "suffix") for kind in text[f"stack.{name}"]]
        if any(window is not None and window < tokens for window in windows):
            raise FieldError(
                f"mm_tokens_per_image is {tokens}, more than sliding_window, so that the tokens of an image would not "
                f"all attend to one another, which is not supported"
            )
        return {"pool": rows // side, "projector": "normalized", "attention": "image"}

    def written(self, config: TransformerConfig, images: ImageTokens) -> dict[str, Any]:
        return {"mm_tokens_per_image": images.count}


def _rules(config: TransformerConfig) -> Sequence[Rule]:
    return [
        *vision_text_rules(config, _TEXT),
        Rule("multi_modal_projector.mm_input_projection_weight", "projector/projection/kernel"),
        *norm("multi_modal_projector.mm_soft_emb_norm", "projector/norm"),
    ]


_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "image_size": 896,
    "patch_size": 14,
    "model_type": "siglip_vision_model",
}


def _variant(name: str, parameters: int, text: Mapping[str, Any]) -> Variant:
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    fields = {"text_config": {**scaling, **text}, "vision_config": _TOWER}
    return Variant(hub=f"google/{name}-pt", parameters=parameters, fields=fields)


GEMMA3_IMAGES = Family(
    name="gemma3",
    title="Gemma 3 with images",
    citation="Gemma Team 2025, arXiv 2503.19786",
    heads=vision_text_heads("Gemma3"),
    constants={},
    fields=(
        _Images(text=_TEXT, image=SIGLIP_TOWER, image_kind="siglip_vision_model", marker=262_144, tied=True),
        Unread(("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id", "initializer_range")),
    ),
    rules=_rules,
    variants={
        "gemma-3-4b": _variant(
            "gemma-3-4b",
            4_300_079_472,
            {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34},
        ),
        "gemma-3-12b": _variant(
            "gemma-3-12b",
            12_187_325_040,
            {
                "hidden_size": 3840,
                "intermediate_size": 15_360,
                "num_hidden_layers": 48,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
            },
        ),
        "gemma-3-27b": _variant(
            "gemma-3-27b",
            27_432_406_640,
            {
                "hidden_size": 5376,
                "intermediate_size": 21_504,
                "num_hidden_layers": 62,
                "head_dim": 128,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168,
            },
        ),
    },
    image_text=ImageText(marker="<start_of_image>", before="\n\n<start_of_image>", after="<end_of_image>\n\n"),
    **VISION_TEXT_FILES,
)
"""Gemma 3 with images."""
