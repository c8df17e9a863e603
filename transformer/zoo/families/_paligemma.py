"""PaliGemma 1 and 2: SigLIP and a linear map before Gemma 1 or 2, whose prompts are read in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformer.chat._image_prompts import ImageText
from transformer.config._model import ImageTokens, TransformerConfig
from transformer.zoo._family import variants
from transformer.zoo._fields import Codec, FieldError, Fields, Fixed, Unread, layer_sizes
from transformer.zoo.families._gemma import GEMMA1_CONSTANTS, GEMMA1_FIELDS
from transformer.zoo.families._gemma2 import GEMMA2
from transformer.zoo.families._llama import DECODER_RULES
from transformer.zoo.families._vision_text import SIGLIP_TOWER, TextModel, VisionText, siglip_tower, vision_text_family
from transformer.zoo.weights._rules import linear

# The mask of the whole model decides which tokens attend to later ones, not this field of the decoder.
_SEEN_BOTH_WAYS = Unread(("use_bidirectional_attention", "num_image_tokens"), {"use_bidirectional_attention": True})


def _without_direction(fields: Sequence[Codec]) -> tuple[Codec, ...]:
    kept = (one for one in fields if not (isinstance(one, Fixed) and one.name == "use_bidirectional_attention"))
    return (*kept, _SEEN_BOTH_WAYS)


# The reference fills in the sizes of Gemma 7B and Gemma 2 2B.
_TEXT = {
    "gemma": TextModel(
        constants=GEMMA1_CONSTANTS | {"norm.position": "pre"},
        fields=_without_direction(GEMMA1_FIELDS),
        rules=DECODER_RULES,
        defaults=layer_sizes(3072, 24_576, 28, 16, vocab_size=256_000),
    ),
    "gemma2": TextModel(
        constants=GEMMA2.constants,
        fields=_without_direction(GEMMA2.fields),
        rules=GEMMA2.rules,
        defaults=layer_sizes(2304, 9216, 26, 8, vocab_size=256_000),
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Images(VisionText):
    """`projection_dim`, the width of image features, must be that of the decoder."""

    own: tuple[str, ...] = ("projection_dim",)

    def images(self, values: Fields, text: Fields, image: Fields) -> Fields:
        width = values.get("projection_dim", 2048)
        if width != text["d_model"]:
            raise FieldError(
                f"projection_dim is {width}, but only the width of the decoder, {text['d_model']}, is supported"
            )
        return {"projector": "linear", "attention": "prefix"}

    def written(self, config: TransformerConfig, images: ImageTokens) -> Fields:
        return {"projection_dim": config.d_model, "hidden_size": config.d_model}


def _variant(kind: str, size: int, text: Fields) -> Fields:
    text_config = {"model_type": kind, "vocab_size": 257_216, **text}
    return {"text_config": text_config, "vision_config": siglip_tower(size), "projection_dim": text["hidden_size"]}


_FIRST = layer_sizes(2048, 16_384, 18, 8, 1)
_SMALL = {"hidden_size": 2304}
_MIDDLE = layer_sizes(3584, 14_336, 42, 16, 8)
_VARIANTS = {
    "paligemma-3b-224": ("paligemma-3b-pt-224", 2_923_466_480, _variant("gemma", 224, _FIRST)),
    "paligemma-3b-448": ("paligemma-3b-pt-448", 2_924_351_216, _variant("gemma", 448, _FIRST)),
    "paligemma2-3b-224": ("paligemma2-3b-pt-224", 3_032_242_416, _variant("gemma2", 224, _SMALL)),
    "paligemma2-10b-224": ("paligemma2-10b-pt-224", 9_662_638_832, _variant("gemma2", 224, _MIDDLE)),
}

PALIGEMMA = vision_text_family(
    "PaliGemma",
    _TEXT,
    linear("multi_modal_projector.linear", "projector/projection"),
    name="paligemma",
    title="PaliGemma",
    citation="Beyer et al. 2024, arXiv 2407.07726; Steiner et al. 2024, arXiv 2412.03555",
    fields=(
        _Images(
            text=_TEXT,
            image=(*SIGLIP_TOWER, Unread(("projection_dim", "num_image_tokens", "projector_hidden_act", "vocab_size"))),
            image_kind="siglip_vision_model",
            image_defaults=siglip_tower(224),
            marker=256_000,
            tied=True,
        ),
        Unread(("hidden_size", "vocab_size", "_vocab_size", "ignore_index", "num_hidden_layers", "initializer_range")),
    ),
    variants=variants("google/", _VARIANTS, image_token_index=257_152),
    image_text=ImageText(begin_after_images=True),
)
