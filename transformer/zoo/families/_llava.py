"""LLaVA 1.5: patches of CLIP's last layer but one, two linear layers, and the decoder of Llama."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.chat._image_prompts import ImageText
from transformer.config._model import ImageTokens, TransformerConfig
from transformer.zoo._family import variants
from transformer.zoo._fields import LARGE, FieldError, Fields, Fixed, Unread, layer_sizes
from transformer.zoo.families._llama import DECODER_RULES, LLAMA
from transformer.zoo.families._vision_text import CLIP_TOWER, TextModel, VisionText, vision_text_family
from transformer.zoo.weights._rules import modules

_TEXT = {
    "llama": TextModel(
        constants=LLAMA.constants,
        fields=LLAMA.fields,
        rules=DECODER_RULES,
        defaults=layer_sizes(4096, 11_008, 32, 32, vocab_size=32_000),
    )
}


@dataclass(frozen=True, kw_only=True)
class _Images(VisionText):
    """`vision_feature_layer`: the layer of CLIP whose output is used, without the final norm."""

    own: tuple[str, ...] = ("vision_feature_layer",)

    def images(self, values: Fields, text: Fields, image: Fields) -> Fields:
        layer, layers = values.get("vision_feature_layer", -2), image["num_layers"]
        # 0 is the input of the first layer, and -1 the output of the last one.
        number = layers + 1 + layer if type(layer) is int and layer < 0 else layer
        if type(number) is not int or not 1 <= number <= layers:
            raise FieldError(
                f"vision_feature_layer is {layer!r}, but only the output of one of the {layers} layers is supported"
            )
        return {"projector": "mlp", "attention": "causal", "unused_layers": layers - number}

    def written(self, config: TransformerConfig, images: ImageTokens) -> Fields:
        unused = images.unused_layers
        return {"vision_feature_layer": None if unused is None else -1 - unused, "image_seq_length": images.count}


_TOWER = LARGE | {"image_size": 336, "patch_size": 14, "model_type": "clip_vision_model"}

_TEXT_CONFIG = {"vocab_size": 32_064, "rms_norm_eps": 1e-5}
_VARIANTS = {
    "llava-1.5-7b": ("7b-hf", 7_063_427_072, {"text_config": _TEXT_CONFIG}),
    "llava-1.5-13b": ("13b-hf", 13_351_494_656, {"text_config": _TEXT_CONFIG | layer_sizes(5120, 13_824, 40, 40, 40)}),
}

LLAVA = vision_text_family(
    "Llava",
    _TEXT,
    modules("multi_modal_projector.", "projector/", {"hidden": "linear_1", "projection": "linear_2"}),
    name="llava",
    title="LLaVA 1.5",
    citation="Liu et al. 2023, arXiv 2304.08485 and 2310.03744",
    fields=(
        _Images(
            text=_TEXT,
            image=CLIP_TOWER,
            image_kind="clip_vision_model",
            image_defaults=_TOWER,
            marker=32_000,
            tied=False,
            embedding_norm=True,
        ),
        Fixed("vision_feature_select_strategy", ("default",)),
        Fixed("projector_hidden_act", ("gelu",)),
        Fixed("multimodal_projector_bias", (True,)),
        Unread(("image_seq_length", "ignore_index", "vocab_size", "initializer_range")),
    ),
    variants=variants("llava-hf/llava-1.5-", _VARIANTS, vision_config=_TOWER),
    image_text=ImageText(),
)
