"""Gemma 3 with images: SigLIP, whose patches are averaged to 256 tokens, before the decoder of Gemma 3."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from transformer.chat._image_prompts import ImageText
from transformer.config._model import ImageTokens, TransformerConfig
from transformer.zoo._family import variants
from transformer.zoo._fields import FieldError, Fields, Fixed, Json, Unread, layer_sizes
from transformer.zoo.families._gemma3 import GEMMA3
from transformer.zoo.families._vision_text import SIGLIP_TOWER, TextModel, VisionText, siglip_tower, vision_text_family
from transformer.zoo.weights._rules import Rule, norm

# The reference caps the logits of the text model alone, but not with images.
_FIELDS = tuple(one for one in GEMMA3.fields if "final_logit_softcapping" not in one.names)
_TEXT = {
    "gemma3_text": TextModel(
        constants=GEMMA3.constants,
        fields=(*_FIELDS, Fixed("final_logit_softcapping", (None,))),
        rules=GEMMA3.rules,
        defaults=layer_sizes(2304, 9216, 26, 8, vocab_size=262_208),
    )
}


@dataclass(frozen=True, kw_only=True)
class _Images(VisionText):
    """`mm_tokens_per_image`: the number of tokens per image, after averaging squares of patches."""

    own: tuple[str, ...] = ("mm_tokens_per_image",)

    def images(self, values: Fields, text: Fields, image: Fields) -> Fields:
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

    def written(self, config: TransformerConfig, images: ImageTokens) -> Fields:
        return {"mm_tokens_per_image": images.count}


def _variant(*sizes: int, **more: Json) -> Fields:
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    return {"text_config": scaling | layer_sizes(*sizes) | more, "vision_config": siglip_tower(896)}


_VARIANTS = {
    "gemma-3-4b": ("4b-pt", 4_300_079_472, _variant(2560, 10_240, 34)),
    "gemma-3-12b": ("12b-pt", 12_187_325_040, _variant(3840, 15_360, 48, 16, 8)),
    "gemma-3-27b": (
        "27b-pt",
        27_432_406_640,
        _variant(5376, 21_504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    ),
}
_PROJECTOR = (
    Rule("multi_modal_projector.mm_input_projection_weight", "projector/projection/kernel"),
    *norm("multi_modal_projector.mm_soft_emb_norm", "projector/norm"),
)

GEMMA3_IMAGES = vision_text_family(
    "Gemma3",
    _TEXT,
    _PROJECTOR,
    name="gemma3",
    title="Gemma 3 with images",
    citation="Gemma Team 2025, arXiv 2503.19786",
    fields=(
        _Images(text=_TEXT, image=SIGLIP_TOWER, image_kind="siglip_vision_model", marker=262_144, tied=True),
        Unread(("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id", "initializer_range")),
    ),
    variants=variants("google/gemma-3-", _VARIANTS),
    image_text=ImageText(marker="<start_of_image>", before="\n\n<start_of_image>", after="<end_of_image>\n\n"),
)
