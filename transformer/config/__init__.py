"""What a model is: frozen, typed, validated at birth. No JAX here, so that a recipe or a tool can read it cheaply."""

from transformer.config.checks import ConfigError, boxed_message, check_choice, nearest
from transformer.config.model import (
    Dtype,
    Execution,
    Norm,
    NormPosition,
    NormScope,
    Pooling,
    Position,
    Projection,
    Remat,
    TransformerConfig,
)
from transformer.config.papers import transformer_base, transformer_big
from transformer.config.parts import (
    MLA,
    Activation,
    FeedForwardActivation,
    HeadTransform,
    Layer,
    LayerKind,
    MoE,
    Patches,
    RotaryScaling,
    Series,
)

__all__ = [
    "MLA",
    "Activation",
    "ConfigError",
    "Dtype",
    "Execution",
    "FeedForwardActivation",
    "HeadTransform",
    "Layer",
    "LayerKind",
    "MoE",
    "Norm",
    "NormPosition",
    "NormScope",
    "Patches",
    "Pooling",
    "Position",
    "Projection",
    "Remat",
    "RotaryScaling",
    "Series",
    "TransformerConfig",
    "boxed_message",
    "check_choice",
    "nearest",
    "transformer_base",
    "transformer_big",
]
