"""Qwen2-VL and Qwen2.5-VL: an encoder of images of any size before Qwen 2, with positions of three coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformer.chat._image_prompts import ImageText
from transformer.config._checks import ConfigError
from transformer.config._layer_patterns import fold
from transformer.config._model import DynamicImageTokens, TransformerConfig
from transformer.config._options import FeedForwardOptions, NormOptions
from transformer.config._parts import LayerKind
from transformer.config._positions import RotaryOptions
from transformer.zoo._family import MAX_LAYERS, Family, Variant, read_fields, variants, write_fields
from transformer.zoo._fields import ACTIVATIONS, NEUTRAL, Codec, FieldError, Fields, Unread, layer_sizes, written_as
from transformer.zoo._rotary import Rope
from transformer.zoo.families._llama import COPIES, DECODER_CONSTANTS, DECODER_RULES, FEED_FORWARD, decoder_fields
from transformer.zoo.families._qwen2 import UpperWindows
from transformer.zoo.families._vision_text import object_in, read_marker, vision_text_heads
from transformer.zoo.families._vit import CONVOLUTION
from transformer.zoo.weights._rules import MATRIX, VECTOR, Fused, Rule, fused, linear, modules, norm

_OUTER = ("vision_config", "image_token_id", "image_token_index", "tie_word_embeddings")


@dataclass(frozen=True, kw_only=True)
class _Sections(Rope):
    """Rotary positions of three coordinates: `mrope_section` in `rope_parameters` or `rope_scaling`."""

    def read(self, values: Fields, changes: Fields) -> Fields:
        name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
        given = dict(values.get(name) or {})
        sections = given.pop("mrope_section", None)
        if not isinstance(sections, list | tuple) or len(sections) != 3:
            raise FieldError(f"mrope_section in {name} must be a list of three numbers, got {sections!r:.80}")
        # The published files name the kind of scaling after the sections; there is no scaling.
        kinds = {key: "default" for key in ("type", "rope_type") if given.get(key) == "mrope"}
        plain = super().read({**values, name: given | kinds}, changes)
        return plain | {"position.sections": tuple(sections)}

    def write(self, config: TransformerConfig) -> Fields:
        values = super().write(config)
        sections = list(config.rotary.sections or ())
        return values | {"rope_parameters": values["rope_parameters"] | {"mrope_section": sections}}


_TEXT_SIZES = layer_sizes(8192, 29_568, 80, 64, 8, vocab_size=152_064)
_TEXT_FIELDS = (*decoder_fields(kv_heads=8, epsilon=1e-5), _Sections(default_base=1_000_000.0), UpperWindows())


@dataclass(frozen=True, kw_only=True)
class _Config(Codec):
    """The decoder in text_config, or in older files at the top; the encoder of images in vision_config."""

    kind: str
    """model_type of the whole model."""
    width: str
    """Field of vision_config with the width of the encoder."""
    output: str
    """Field of vision_config with the width of the decoder."""
    gated: bool
    """Whether the encoder is that of Qwen2.5-VL: gated layers, RMSNorm and windows."""

    names = ("text_config", *_OUTER, *(name for codec in _TEXT_FIELDS for name in codec.names))

    def read(self, values: Fields, changes: Fields) -> Fields:
        text, given = self._text(values), self._vision(values)
        if (width := given.get(self.output, 3584)) != text["d_model"]:
            raise FieldError(
                f"{self.output} of vision_config is {width!r}, but only the width of the decoder, {text['d_model']}, "
                f"is supported"
            )
        marker = read_marker(values, ("image_token_id", "image_token_index"), 151_655, text["vocab_size"])
        sides = {name: _side(name, given.get(name, default)) for name, default in _SIDES.items()}
        try:
            images = DynamicImageTokens(
                token_id=marker,
                encoder=self._encoder(given),
                patch_size=sides["patch_size"],
                frames=sides["temporal_patch_size"],
                merge=given.get("spatial_merge_size", 2),
                # The reference reads in_channels; published files have it under its former name.
                channels=given.get("in_channels", given.get("in_chans", 3)),
                window_size=given.get("window_size", 112) if self.gated else None,
            )
        except ConfigError as error:
            raise FieldError(f"vision_config describes no valid model: {error}") from None
        return text | {"input": images}

    def _text(self, values: Fields) -> Fields:
        inner = values.get("text_config")
        if inner is not None and not isinstance(inner, dict):
            raise FieldError(f"text_config must be an object, got {inner!r:.80}")
        # Published files have the decoder's fields at the top.
        mine = {name for codec in _TEXT_FIELDS for name in codec.names} | set(NEUTRAL)
        given = {name: value for name, value in values.items() if name in mine} if inner is None else inner
        if (kind := given.get("model_type", self.kind)) not in (self.kind, f"{self.kind}_text"):
            raise FieldError(f"model_type of text_config is {kind!r}, but only {self.kind}_text is supported")
        tied = values.get("tie_word_embeddings", given.get("tie_word_embeddings", False))
        text, faults = read_fields(_TEXT_SIZES | given | {"tie_word_embeddings": tied}, _TEXT_FIELDS, {})
        if faults:
            where = "" if inner is None else "in text_config, "
            raise FieldError("; ".join(f"{where}{fault}" for fault in faults))
        return text

    def _vision(self, values: Fields) -> Fields:
        given = object_in(values, "vision_config")
        known = {"depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size", "hidden_act"}
        known |= {"in_channels", "in_chans", "hidden_size", "initializer_range", "model_type", "rope_parameters"}
        known |= {"spatial_patch_size", self.width, self.output, *NEUTRAL}
        own = {"intermediate_size", "window_size", "fullatt_block_indexes", "tokens_per_second"}
        known |= own if self.gated else {"mlp_ratio"}
        if strange := sorted(given.keys() - known):
            raise FieldError(f"in vision_config, {', '.join(strange[:5])} is not known")
        rope = given.get("rope_parameters") or {}
        if rope.get("rope_type", "axial") != "axial" or rope.get("rope_theta", 10_000.0) != 10_000.0:
            raise FieldError(f"rope_parameters of vision_config is {rope!r:.80}, but only axial of 10000 is supported")
        return given

    def _encoder(self, given: Fields) -> TransformerConfig:
        name = given.get("hidden_act", "silu" if self.gated else "quick_gelu")
        if name not in ACTIVATIONS:
            raise FieldError(f"hidden_act of vision_config is {name!r:.80}, which is not supported")
        width, heads = given.get(self.width, 3584 if self.gated else 1280), given.get("num_heads", 16)
        if type(width) is not int or type(heads) is not int or heads < 1 or width % (4 * heads):
            raise FieldError(
                f"{self.width} of vision_config is {width!r:.80}, but only a multiple of 4 num_heads ({heads!r:.80}) "
                f"is supported: half of the pairs of a head are rotated by the row"
            )
        layers, full = given.get("depth", 32), given.get("fullatt_block_indexes", [7, 15, 23, 31])
        if type(layers) is not int or not 1 <= layers <= MAX_LAYERS:
            raise FieldError(f"depth of vision_config is {layers!r:.80}, but only 1 to {MAX_LAYERS} is supported")
        pairs = width // heads // 4
        return TransformerConfig(
            d_model=width,
            num_layers=layers,
            num_heads=heads,
            feed_forward=FeedForwardOptions(
                d_ff=given.get("intermediate_size", 3420) if self.gated else int(width * given.get("mlp_ratio", 4)),
                activation=ACTIVATIONS[name],
                gated=self.gated,
            ),
            norm=NormOptions(kind="rms_norm" if self.gated else "layer_norm"),
            # Half of the pairs of a head by the row of a patch, half by its column.
            position=RotaryOptions(sections=(pairs, pairs), restart_frequencies=True),
            **fold([LayerKind(within_segments=self.gated and layer not in full) for layer in range(layers)]),
        )

    def write(self, config: TransformerConfig) -> Fields:
        images = config.dynamic_images
        if images is None or images.encoder.feed_forward.gated != self.gated or config.rotary.sections is None:
            return {}
        text = {"model_type": f"{self.kind}_text"} | write_fields(config, _TEXT_FIELDS)
        text.pop("tie_word_embeddings")
        encoder = images.encoder
        image = {
            "model_type": f"{self.kind}_vision",
            "depth": encoder.num_layers,
            self.output: config.d_model,
            self.width: encoder.d_model,
            "num_heads": encoder.num_heads,
            **({"hidden_act": None} | written_as("hidden_act", encoder.feed_forward.activation)),
            "in_channels": images.channels,
            "patch_size": images.patch_size,
            "spatial_merge_size": images.merge,
            "temporal_patch_size": images.frames,
        }
        if self.gated:
            image |= {
                "intermediate_size": encoder.feed_forward_width,
                "window_size": images.window_size or images.multiple,
                "fullatt_block_indexes": [n for n, one in enumerate(encoder.layers()) if not one.kind.within_segments],
            }
        else:
            ratio = encoder.feed_forward_width / encoder.d_model
            image["mlp_ratio"] = int(ratio) if ratio == int(ratio) else ratio
        return {
            "text_config": text,
            "vision_config": image,
            "image_token_id": images.token_id,
            "tie_word_embeddings": config.embedding.tie,
        }


_SIDES = {"patch_size": 14, "temporal_patch_size": 2}


def _side(name: str, value: object) -> object:
    """Return a size that can be a list of equal numbers."""
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(map(str, sides))) != 1:
        raise FieldError(f"{name} of vision_config is {value!r:.80}, but only equal sides are supported")
    return sides[0]


def _rules(config: TransformerConfig) -> list[Rule]:
    block, ours = "visual.blocks.{layer}.", "image/encoder/{layer}/"
    maps = [f"{ours}self_attention/{name}" for name in ("query", "key", "value")]
    names = {"attention_norm": "norm1", "feed_forward_norm": "norm2", "self_attention/out": "attn.proj"}
    is_gated = config.dynamic_images is None or config.dynamic_images.encoder.feed_forward.gated
    inner = FEED_FORWARD if is_gated else {"up": "fc1", "down": "fc2"}
    names |= {f"feed_forward/{name}": f"mlp.{theirs}" for name, theirs in inner.items()}
    return [
        *DECODER_RULES,
        Rule("lm_head.weight", "output/kernel", MATRIX),
        Rule("visual.patch_embed.proj.weight", "image/tubelet_embedding/kernel", CONVOLUTION),
        *fused(f"{block}attn.qkv", maps, Fused(), Fused(0, VECTOR)),
        *modules(block, ours, names),
        *norm("visual.merger.ln_q", "image/encoder/final_norm"),
        *linear("visual.merger.mlp.0", "projector/hidden"),
        *linear("visual.merger.mlp.2", "projector/projection"),
    ]


_ALIKE: Fields = {
    "constants": DECODER_CONSTANTS | {"attention.biases": ("query", "key", "value")},
    "rules": _rules,
    "copies": COPIES,
    "image_text": ImageText(
        marker="<|vision_start|><|image_pad|><|vision_end|>", before="<|vision_start|>", after="<|vision_end|>"
    ),
}
_SPECIAL = Unread(("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"))


def _variants(table: Mapping[str, tuple[str | int | Fields, ...]]) -> dict[str, Variant]:
    scaling = {"type": "mrope", "mrope_section": [16, 24, 24]}
    return variants("Qwen/", table, rms_norm_eps=1e-6, rope_theta=1_000_000.0, rope_scaling=scaling)


_2B = {"vocab_size": 151_936, "tie_word_embeddings": True, "vision_config": {"hidden_size": 1536, "embed_dim": 1280}}
_7B = {"vocab_size": 152_064, "vision_config": {"hidden_size": 3584, "embed_dim": 1280}}
_VARIANTS = {
    "qwen2-vl-2b": ("Qwen2-VL-2B-Instruct", 2_208_985_600, 1536, 8960, 28, 12, 2, _2B),
    "qwen2-vl-7b": ("Qwen2-VL-7B-Instruct", 8_291_375_616, 3584, 18_944, 28, 28, 4, _7B),
}
_3B_5 = _2B | {"vision_config": {"hidden_size": 1280, "out_hidden_size": 2048}}
_7B_5 = _7B | {"vision_config": {"hidden_size": 1280, "out_hidden_size": 3584}}
_VARIANTS_5 = {
    "qwen2.5-vl-3b": ("Qwen2.5-VL-3B-Instruct", 3_754_622_976, 2048, 11_008, 36, 16, 2, _3B_5),
    "qwen2.5-vl-7b": ("Qwen2.5-VL-7B-Instruct", 8_292_166_656, 3584, 18_944, 28, 28, 4, _7B_5),
}

QWEN2_VL = Family(
    name="qwen2_vl",
    title="Qwen2-VL",
    citation="Wang et al. 2024, arXiv 2409.12191",
    heads=vision_text_heads("Qwen2VL"),
    fields=(_Config(kind="qwen2_vl", width="embed_dim", output="hidden_size", gated=False), _SPECIAL),
    variants=_variants(_VARIANTS),
    **_ALIKE,
)

QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    title="Qwen2.5-VL",
    citation="Bai et al. 2025, arXiv 2502.13923",
    heads=vision_text_heads("Qwen2_5_VL"),
    fields=(_Config(kind="qwen2_5_vl", width="hidden_size", output="out_hidden_size", gated=True), _SPECIAL),
    variants=_variants(_VARIANTS_5),
    **_ALIKE,
)
