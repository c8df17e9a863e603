"""Model configs and execution options: frozen dataclasses that validate themselves when they are constructed.

This package does not import JAX, so that recipes and tools load quickly.
"""

from transformer.config._checks import ConfigError
from transformer.config._execution import Execution
from transformer.config._model import DynamicImageTokens, Images, ImageTokens, TransformerConfig
from transformer.config._options import (
    AttentionOptions,
    Audio,
    EmbeddingOptions,
    FeedForwardOptions,
    NormOptions,
    OutputOptions,
    ParameterOptions,
    QKNorm,
    Speech,
    StackOptions,
)
from transformer.config._papers import gpt2_decoder, llama_decoder, transformer_base, transformer_big
from transformer.config._parts import (
    MLA,
    GatedDelta,
    HeadTransform,
    LayerKind,
    MoE,
    Patches,
    QueryTemperature,
    RotaryScaling,
    Series,
)
from transformer.config._positions import (
    ALiBiOptions,
    LearnedOptions,
    RotaryGridOptions,
    RotaryOptions,
    SinusoidalOptions,
    T5BiasOptions,
)

__all__ = [
    "MLA",
    "ALiBiOptions",
    "AttentionOptions",
    "Audio",
    "ConfigError",
    "DynamicImageTokens",
    "EmbeddingOptions",
    "Execution",
    "FeedForwardOptions",
    "GatedDelta",
    "HeadTransform",
    "ImageTokens",
    "Images",
    "LayerKind",
    "LearnedOptions",
    "MoE",
    "NormOptions",
    "OutputOptions",
    "ParameterOptions",
    "Patches",
    "QKNorm",
    "QueryTemperature",
    "RotaryGridOptions",
    "RotaryOptions",
    "RotaryScaling",
    "Series",
    "SinusoidalOptions",
    "Speech",
    "StackOptions",
    "T5BiasOptions",
    "TransformerConfig",
    "gpt2_decoder",
    "llama_decoder",
    "transformer_base",
    "transformer_big",
]
