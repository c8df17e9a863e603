"""The table of model kinds, `MODEL_KINDS`: what each class of models reads and computes.

Other code never compares classes of models; it asks the fields of `kind_of(model)`. To add a class of models, add it to
the table. A subclass without an entry has that of its base class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import flax.linen as nn
import jax.numpy as jnp

from transformer.nn._axes import Array
from transformer.nn.models._audio import SpeechEncoder, SpeechRecognizer
from transformer.nn.models._base import TokenEncoder
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._dual import DualEncoder
from transformer.nn.models._encoders import Classifier, MaskedLM
from transformer.nn.models._forecaster import SeriesEncoder
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._series import SeriesClassifier
from transformer.nn.models._speech import FRAMES_A_POSITION, SpeechToText
from transformer.nn.models._vision import VisionClassifier, VisionEncoder
from transformer.nn.models._vision_language import VisionLanguageModel

Input: TypeAlias = Literal["text", "images", "sound", "series"]


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """What a class of models reads and computes."""

    reads: tuple[Input, ...] = ()
    """inputs of a forward pass"""
    source: bool = False
    """whether an encoder reads a source, from which a decoder generates the target"""
    predicts_tokens: bool = False
    """whether the outputs are logits of the tokens that the model reads, whose table may be tied to the embeddings"""
    writes: Literal["continuation", "translation", "transcript", "characters"] | None = None
    """text that the model generates; "characters": of a recording, by CTC"""
    image_prompts: bool = False
    """whether prompts may contain images"""
    embeds: tuple[Input, ...] = ()
    """inputs that have a vector; with two of them, in one space"""
    classifies: Input | None = None
    """input that has probabilities of classes"""
    serves: Literal["completions", "translations", "embeddings"] | None = None
    """part of the HTTP interface"""
    inspects: tuple[Input, ...] = ()
    """inputs whose attention weights are drawn"""

    @property
    def compares(self) -> bool:
        """Whether texts and images have vectors in one space."""
        return len(self.embeds) > 1


_CAUSAL = {"predicts_tokens": True, "writes": "continuation", "embeds": ("text",), "serves": "completions"}
_SEQ2SEQ = {"source": True, "predicts_tokens": True}
_ENCODER = {"reads": ("text",), "embeds": ("text",), "serves": "embeddings", "inspects": ("text",)}
_IMAGES = {"reads": ("images",), "embeds": ("images",), "inspects": ("images",)}
_BOTH = ("text", "images")

MODEL_KINDS: Mapping[type, ModelKind] = {
    CausalLM: ModelKind(**_CAUSAL, reads=("text",), inspects=("text",)),
    VisionLanguageModel: ModelKind(**_CAUSAL, reads=_BOTH, image_prompts=True, inspects=_BOTH),
    Seq2Seq: ModelKind(
        **_SEQ2SEQ, reads=("text",), writes="translation", embeds=("text",), serves="translations", inspects=("text",)
    ),
    SpeechToText: ModelKind(**_SEQ2SEQ, reads=("sound",), writes="transcript", inspects=("sound",)),
    SpeechRecognizer: ModelKind(reads=("sound",), writes="characters"),
    SpeechEncoder: ModelKind(reads=("sound",)),
    TokenEncoder: ModelKind(**_ENCODER),
    MaskedLM: ModelKind(**_ENCODER, predicts_tokens=True),
    Classifier: ModelKind(**_ENCODER, classifies="text"),
    VisionEncoder: ModelKind(**_IMAGES),
    VisionClassifier: ModelKind(**_IMAGES, classifies="images"),
    DualEncoder: ModelKind(reads=_BOTH, embeds=_BOTH, inspects=("images",)),
    SeriesEncoder: ModelKind(reads=("series",)),
    SeriesClassifier: ModelKind(reads=("series",), classifies="series"),
}
"""what models read and compute, by class"""


def kind_of(model: object) -> ModelKind:
    """Return the kind of a model; an unknown class reads and computes nothing."""
    return next((MODEL_KINDS[one] for one in type(model).__mro__ if one in MODEL_KINDS), ModelKind())


def example_inputs(model: nn.Module) -> tuple[Array, ...]:
    """Return the smallest inputs that initialize a model; parameters don't depend on batch size or length."""
    config, kind, tokens = model.config, kind_of(model), jnp.zeros((1, 1), jnp.int32)
    if "images" in kind.embeds:
        patches = config.patches or config.images.patches
        pixels = jnp.zeros((1, patches.image_height, patches.image_width, patches.channels))
        return (tokens, pixels) if kind.compares else (pixels,)
    match kind.reads, kind.source:
        case ("series",), _:
            return (jnp.zeros((1, config.series.context_length, config.series.channels)),)
        case ("sound",), False:
            return (jnp.zeros((1, config.audio.shortest)),)
        case ("sound",), True:
            return (jnp.zeros((1, FRAMES_A_POSITION * (config.longest_source or 1), config.speech.mel_bins)), tokens)
    return (tokens, tokens) if kind.source else (tokens,)
