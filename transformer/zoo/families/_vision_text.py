"""What families of vision-language models share: two configs inside config.json, and the names of tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformer.config._checks import ConfigError
from transformer.config._model import ImageTokens, TransformerConfig
from transformer.config._paths import get_path
from transformer.nn.models._vision_language import VisionLanguageModel
from transformer.zoo._family import Family, Head, NoCounterpart, Rules, read_fields, refuse, rules_of, write_fields
from transformer.zoo._fields import Codec, FieldError, Fields, Unread
from transformer.zoo.families._clip import ENCODER_LAYER, encoder_fields, image_rules, patch_encoder
from transformer.zoo.families._siglip import SO400M
from transformer.zoo.families._vit import PatchSizes
from transformer.zoo.weights._rules import MATRIX, Rule, modules, norm

SIGLIP_TOWER = (
    *encoder_fields(768, 12, 3072, "gelu_pytorch_tanh", 1e-6),
    PatchSizes(class_token=False),
    # The pooling of SigLIP is not used.
    Unread(("vision_use_head",), {"vision_use_head": False}),
)
"""Fields of vision_config for an encoder of SigLIP."""


def siglip_tower(image_size: int) -> Fields:
    """Return vision_config of the published models with an encoder of SigLIP."""
    return SO400M | {"image_size": image_size, "patch_size": 14, "model_type": "siglip_vision_model"}


CLIP_TOWER = (
    *encoder_fields(768, 12, 3072, "quick_gelu", 1e-5),
    PatchSizes(patch_size=32, use_bias=False),
    Unread(("projection_dim", "vocab_size")),
)
"""Fields of vision_config for an encoder of CLIP."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A family of decoders that a vision-language model can contain: the object text_config."""

    constants: Fields
    """Fields of the TransformerConfig that all models of the family share."""
    fields: tuple[Codec, ...]
    """Codecs for all other fields."""
    rules: Rules
    """Rules of the family, with its own names of tensors."""
    defaults: Fields = field(default_factory=dict)
    """Fields of text_config that the family's own files must contain, but that may be missing here."""

    def fits(self, config: TransformerConfig) -> bool:
        """Return whether this family has the constants of a config."""
        return not self.differences(config)

    def differences(self, config: TransformerConfig) -> list[str]:
        """Return one sentence for each constant of this family that a config does not have."""
        found = {name: get_path(config, name) for name in self.constants}
        return [
            f"{name} is {found[name]!r:.80}, {value!r:.80} is needed"
            for name, value in self.constants.items()
            # The fields of the position scheme are not constants.
            if (type(found[name]) is not type(value) if name == "position" else found[name] != value)
        ]


@dataclass(frozen=True, kw_only=True)
class VisionText(Codec):
    """The objects text_config and vision_config, and what relates them; a subclass adds the fields of its family."""

    text: Mapping[str, TextModel]
    """Decoders by model_type; the first is the default."""
    image: tuple[Codec, ...]
    """Codecs of vision_config."""
    image_kind: str
    """model_type of vision_config."""
    image_defaults: Fields = field(default_factory=dict)
    """Fields of vision_config if the whole object is missing."""
    marker: int
    """Default of image_token_index."""
    tied: bool
    """Default of tie_word_embeddings."""
    embedding_norm: bool = False

    own: tuple[str, ...] = ()
    """Fields of config.json that only this family has."""

    @property
    def names(self) -> tuple[str, ...]:
        marker = ("image_token_index", "image_token_id", "tie_word_embeddings")
        return ("text_config", "vision_config", *marker, *self.own)

    @abstractmethod
    def images(self, values: Fields, text: Fields, image: Fields) -> Fields:
        """Return the fields of `ImageTokens` that the family defines, given those of both configs."""

    @abstractmethod
    def written(self, config: TransformerConfig, images: ImageTokens) -> Fields:
        """Return the family's own fields of config.json, the inverse of `images`."""

    def read(self, values: Fields, changes: Fields) -> Fields:
        if values.get("text_config") is None:
            raise FieldError(
                f"text_config is missing, the object that describes the decoder (supported: {', '.join(self.text)})"
            )
        model = self._text_model(values)
        tied = values.get("tie_word_embeddings", self.tied)
        given = {**model.defaults, **object_in(values, "text_config")}
        # text_config can tie what the outer config does not only where untied is the default, as in the reference.
        tie = bool(tied or (not self.tied and given.get("tie_word_embeddings")))
        text, faults = read_fields(given | {"tie_word_embeddings": tie}, model.fields, model.constants)
        seen = object_in(values, "vision_config") or self.image_defaults
        if (found := seen.get("model_type", self.image_kind)) != self.image_kind:
            raise FieldError(f"model_type of vision_config is {found!r}, but only {self.image_kind} is supported")
        image, more = read_fields(seen, self.image, {})
        refuse(text_config=faults, vision_config=more)
        marker = read_marker(values, ("image_token_index", "image_token_id"), self.marker, text["vocab_size"])
        own = self.images(values, text, image)
        unused = own.get("unused_layers")
        image |= {"num_layers": image["num_layers"] - (unused or 0), "stack.final_norm": unused is None}
        try:
            encoder = patch_encoder(image | {"embedding.norm": self.embedding_norm})
            images = ImageTokens(token_id=marker, encoder=encoder, **own)
        except ConfigError as error:
            raise FieldError(f"vision_config and the fields of images describe no valid model: {error}") from None
        return text | {"input": images}

    def _text_model(self, values: Fields) -> TextModel:
        kind = object_in(values, "text_config").get("model_type", next(iter(self.text)))
        if kind not in self.text:
            raise FieldError(f"model_type of text_config is {kind!r}, but only {', '.join(self.text)} is supported")
        return self.text[kind]

    def write(self, config: TransformerConfig) -> Fields:
        images = config.image_tokens
        if images is None:
            return {}
        unlike = {kind: model.differences(config) for kind, model in self.text.items()}
        kind = min(unlike, key=lambda name: len(unlike[name]))
        if unlike[kind]:
            raise NoCounterpart(
                f"its decoder must be one of {', '.join(unlike)}; compared with {kind}, {'; '.join(unlike[kind])}",
                len(unlike[kind]),
            )
        model = self.text[kind]
        text = {"model_type": kind} | write_fields(config, model.fields)
        encoder = config.image_encoder
        whole = encoder.replace(num_layers=encoder.num_layers + (images.unused_layers or 0))
        image = {"model_type": self.image_kind} | write_fields(whole, self.image)
        values = {"text_config": text, "vision_config": image, "image_token_index": images.token_id}
        own = self.written(config, images)
        for name in ("text_config", "vision_config"):
            values[name] |= own.pop(name, {})
        return values | {"tie_word_embeddings": config.embedding.tie} | own


def read_marker(values: Fields, names: tuple[str, str], default: int, vocab_size: int) -> int:
    """Return the id of the token that stands for an image, from the first of two fields that is given."""
    marker = values.get(names[0], values.get(names[1], default))
    if type(marker) is not int or not 0 <= marker < vocab_size:
        raise FieldError(
            f"{names[0]} is {marker!r}, but only an id of the vocabulary ({vocab_size} tokens) is supported"
        )
    return marker


def object_in(values: Fields, name: str) -> Fields:
    value = values.get(name) or {}
    if not isinstance(value, dict):
        raise FieldError(f"{name} must be an object, got {value!r:.80}")
    return value


def vision_text_rules(config: TransformerConfig, text: Mapping[str, TextModel]) -> list[Rule]:
    """Return the rules of the decoder and of the encoder of images, without those of the projector."""
    model = next((model for model in text.values() if model.fits(config)), next(iter(text.values())))
    rules = [_inside("language_model.", rule) for rule in rules_of(model.rules, config)]
    rules += [*image_rules("vision_tower."), Rule("language_model.lm_head.weight", "output/kernel", MATRIX)]
    images = config.image_tokens
    if images is not None and images.unused_layers is not None:
        for i in range(images.unused_layers):
            tensors = f"vision_tower.encoder.layers.{images.encoder.num_layers + i}."
            rules += modules(tensors, f"image_unused/prefix_{i}/", ENCODER_LAYER)
        rules += norm("vision_tower.post_layernorm", "image_unused/final_norm")
    return rules


def _inside(prefix: str, rule: Rule) -> Rule:
    tensors = (rule.tensors,) if isinstance(rule.tensors, str) else rule.tensors
    return replace(rule, tensors=tuple(f"{prefix}{name}" for name in tensors))


def vision_text_heads(reference: str) -> dict[str, Head]:
    """Return the only architecture of these families, with the class name of the reference."""
    return {f"{reference}ForConditionalGeneration": Head(model=VisionLanguageModel)}


def vision_text_family(
    reference: str, text: Mapping[str, TextModel], projector: Sequence[Rule], **facts: Any
) -> Family:
    """Return a family of vision-language models, with the rules of the layers between both parts, and other facts."""
    return Family(
        heads=vision_text_heads(reference),
        constants={},
        rules=lambda config: [*vision_text_rules(config, text), *projector],
        ignored=(
            r"vision_tower\.(vision_model\.)?(embeddings\.position_ids|head\..*)",
            r"language_model\.model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        ),
        copies={"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"},
        old_names={"vision_tower.": "vision_tower.vision_model."},
        **facts,
    )
