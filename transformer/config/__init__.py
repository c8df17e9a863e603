"""What a model is: frozen, typed, validated at birth. No JAX here, so that a recipe or a tool can read it cheaply."""

from transformer.config._checks import ConfigError
from transformer.config._model import Execution, TransformerConfig
from transformer.config._papers import transformer_base, transformer_big
from transformer.config._parts import MLA, HeadTransform, LayerKind, MoE, Patches, RotaryScaling, Series

__all__ = [
    "MLA",
    "ConfigError",
    "Execution",
    "HeadTransform",
    "LayerKind",
    "MoE",
    "Patches",
    "RotaryScaling",
    "Series",
    "TransformerConfig",
    "transformer_base",
    "transformer_big",
]
