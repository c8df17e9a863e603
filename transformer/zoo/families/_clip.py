"""CLIP: encoders of texts and images that are trained together, with quick GELU and a causal text encoder."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformer.config._model import Images, TransformerConfig
from transformer.config._positions import LearnedOptions
from transformer.nn.models._dual import DualEncoder
from transformer.zoo._family import LAYER_NORM, Family, Head, Variant, read_fields, refuse, write_fields
from transformer.zoo._fields import LARGE, Codec, Field, FieldError, Fields, Unread, activation_field, sizes
from transformer.zoo.families._bart import ATTENTION
from transformer.zoo.families._vit import CONVOLUTION, PatchSizes
from transformer.zoo.weights._rules import EachTensor, Rule, linear, modules, norm


@dataclass(frozen=True)
class TwoConfigs(Codec):
    """The configs of both encoders, which are objects inside config.json, and what relates them."""

    text: tuple[Codec, ...]
    """Codecs of text_config."""
    image: tuple[Codec, ...]
    """Codecs of vision_config."""
    constants: Fields = field(default_factory=dict)
    """Fields of `Images` that all models of the family share."""
    encoder: Fields = field(default_factory=dict)
    """Fields of the encoder of images that all models of the family share."""
    kinds: tuple[str, str] = ("clip_text_model", "clip_vision_model")
    """model_type of both objects."""
    features: str = "projection_dim"
    """Field with the size of the common space. In a family without a projection of images it is in text_config."""

    # Older files repeat the objects under the names with `_dict`, which then apply.
    names = ("text_config", "vision_config", "text_config_dict", "vision_config_dict", "projection_dim")

    def read(self, values: Fields, changes: Fields) -> Fields:
        given = {name: self._object(values, name) for name in ("text_config", "vision_config")}
        text, faults = read_fields(given["text_config"], self.text, {})
        image, more = read_fields(given["vision_config"], self.image, {})
        refuse(text_config=faults, vision_config=more)
        if self.constants.get("projections") == "text":
            features = given["text_config"].get(self.features) or text["d_model"]
        else:
            features = values.get(self.features, 512)
        encoder = patch_encoder(image | self.encoder)
        return text | {"input": Images(encoder=encoder, features=features, **self.constants)}

    def _object(self, values: Fields, name: str) -> Fields:
        parts = [values.get(key) or {} for key in (name, f"{name}_dict")]
        if not all(isinstance(part, dict) for part in parts):
            raise FieldError(f"{name} must be an object")
        return parts[0] | parts[1]

    def write(self, config: TransformerConfig) -> Fields:
        if config.images is None:
            return {}
        values: Fields = {}
        both = {"text_config": (config, self.text), "vision_config": (config.image_encoder, self.image)}
        for (name, (one, codecs)), kind in zip(both.items(), self.kinds, strict=True):
            values[name] = {"model_type": kind} | write_fields(one, codecs)
        features = {self.features: config.images.features}
        if self.constants.get("projections") == "text":
            values["text_config"] |= features
            return values
        return values | features


class EndToken(Codec):
    """The token at whose position the reference pools a text: the largest id. Older files say 2 instead."""

    names = ("eos_token_id",)

    def read(self, values: Fields, changes: Fields) -> Fields:
        last = changes["vocab_size"] - 1
        if (given := values.get("eos_token_id", last)) not in (last, 2):
            raise FieldError(
                f"eos_token_id is {given!r}, but texts are pooled at the last token of the vocabulary, {last}; another "
                f"one is not supported"
            )
        return {}

    def write(self, config: TransformerConfig) -> Fields:
        return {"eos_token_id": (config.vocab_size or 1) - 1}


_SCALAR = EachTensor(lambda shape: (), lambda tensor, shape: tensor.reshape(1), lambda parameter: parameter.reshape(()))
"""A parameter (1,) that is stored as a tensor without axes."""


def patch_encoder(fields: Fields) -> TransformerConfig:
    """Return the config of an encoder of patches from its other fields: its positions are learned."""
    return TransformerConfig(position=None if fields["input"].resize_positions else LearnedOptions(), **fields)


def encoder_fields(
    width: int, heads: int, d_ff: int, activation: str, epsilon: float, unread: tuple[str, ...] = ()
) -> tuple[Codec, ...]:
    """Return the fields that the encoders of CLIP and SigLIP share, with their defaults."""
    return (
        *sizes(d_model=("hidden_size", width), num_layers=("num_hidden_layers", 12)),
        *sizes(num_heads=("num_attention_heads", heads)),
        Field("intermediate_size", "feed_forward.d_ff", d_ff),
        activation_field("hidden_act", activation),
        Field("layer_norm_eps", "norm.epsilon", epsilon),
        Field("attention_dropout", "attention.dropout_rate", 0.0),
        Unread(("dropout", "initializer_range", "initializer_factor", *unread)),
    )


def text_fields(vocab_size: int, length: int) -> tuple[Codec, ...]:
    """Return the fields that only text_config has, with their defaults."""
    return (
        Field("vocab_size", "vocab_size", vocab_size),
        Field("max_position_embeddings", "position.max_length", length),
    )


DUAL_CONSTANTS = LAYER_NORM | {"position": LearnedOptions(), "output.pooling": "last"}
"""Constants of CLIP and SigLIP."""

ENCODER_LAYER = {
    "attention_norm": "layer_norm1",
    **{f"self_attention/{name}": f"self_attn.{theirs}" for name, theirs in ATTENTION.items()},
    "feed_forward_norm": "layer_norm2",
    "feed_forward/up": "mlp.fc1",
    "feed_forward/down": "mlp.fc2",
}
"""Modules of a layer of CLIP and SigLIP, and the names of their tensors."""


def dual_rules() -> list[Rule]:
    """Return the rules for the encoders of CLIP and SigLIP."""
    return [
        Rule("text_model.embeddings.token_embedding.weight", "text/embedding/embedding"),
        Rule("text_model.embeddings.position_embedding.weight", "text/encoder/position_table"),
        *modules("text_model.encoder.layers.{layer}.", "text/encoder/{layer}/", ENCODER_LAYER),
        *norm("text_model.final_layer_norm", "text/encoder/final_norm"),
        *image_rules("vision_model."),
    ]


def image_rules(prefix: str) -> list[Rule]:
    """Return the rules for the encoder of images of CLIP and SigLIP; `prefix` is that of all tensor names."""
    return [
        *linear(f"{prefix}embeddings.patch_embedding", "image/patch_embedding", CONVOLUTION),
        Rule(f"{prefix}embeddings.position_embedding.weight", "image/encoder/position_table"),
        Rule(f"{prefix}embeddings.class_embedding", "image/class_token"),
        # The name of this tensor is misspelled in all files.
        *norm(f"{prefix}pre_layrnorm", "image/encoder/embedding_norm"),
        *modules(f"{prefix}encoder.layers.{{layer}}.", "image/encoder/{layer}/", ENCODER_LAYER),
        *norm(f"{prefix}post_layernorm", "image/encoder/final_norm"),
    ]


_RULES = [
    *dual_rules(),
    *linear("text_projection", "text_projection"),
    *linear("visual_projection", "image_projection"),
    Rule("logit_scale", "logit_scale", _SCALAR),
]


def _variant(name: str, parameters: int, patch_size: int, image_size: int = 224) -> Variant:
    text, image, features = {}, {"patch_size": patch_size, "image_size": image_size}, 512
    if "large" in name:
        text = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
        image |= LARGE
        features = 768
    fields = {"text_config": text, "vision_config": image, "projection_dim": features}
    return Variant(hub=f"openai/{name}", parameters=parameters, fields=fields)


CLIP = Family(
    name="clip",
    title="CLIP",
    citation="Radford et al. 2021, arXiv 2103.00020",
    heads={"CLIPModel": Head(model=DualEncoder)},
    constants=DUAL_CONSTANTS | {"attention.causal": True},
    fields=(
        TwoConfigs(
            text=(
                *encoder_fields(512, 8, 2048, "quick_gelu", 1e-5, ("projection_dim",)),
                *text_fields(49_408, 77),
                EndToken(),
            ),
            image=(
                *encoder_fields(768, 12, 3072, "quick_gelu", 1e-5, ("projection_dim",)),
                PatchSizes(patch_size=32, use_bias=False),
            ),
            constants={"projections": "both", "similarity": "softmax"},
            encoder={"embedding.norm": True, "output.pooling": "first"},
        ),
        Unread(("logit_scale_init_value", "initializer_factor", "initializer_range", "tie_word_embeddings")),
    ),
    rules=_RULES,
    ignored=(r"(text|vision)_model\.embeddings\.position_ids",),
    variants={
        "clip-vit-base-patch32": _variant("clip-vit-base-patch32", 151_277_313, 32),
        "clip-vit-base-patch16": _variant("clip-vit-base-patch16", 149_620_737, 16),
        "clip-vit-large-patch14": _variant("clip-vit-large-patch14", 427_616_513, 14),
        "clip-vit-large-patch14-336": _variant("clip-vit-large-patch14-336", 427_944_193, 14, 336),
    },
)
