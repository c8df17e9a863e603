"""What a model is: frozen, typed, validated at birth. No JAX here, so that a recipe or a tool can read it cheaply."""

from transformer.config.checks import ConfigError
from transformer.config.checks import boxed_message as boxed_message
from transformer.config.checks import check_choice as check_choice
from transformer.config.checks import nearest as nearest
from transformer.config.model import Dtype as Dtype
from transformer.config.model import Execution, TransformerConfig
from transformer.config.model import Norm as Norm
from transformer.config.model import NormPosition as NormPosition
from transformer.config.model import Position as Position
from transformer.config.model import Remat as Remat
from transformer.config.options import (
    AttentionOptions,
    EmbeddingOptions,
    OutputOptions,
    RotaryOptions,
    Speech,
    StackOptions,
    T5BiasOptions,
)
from transformer.config.options import NormScope as NormScope
from transformer.config.options import Pooling as Pooling
from transformer.config.options import Projection as Projection
from transformer.config.papers import gpt2_decoder, llama_decoder, transformer_base, transformer_big
from transformer.config.parts import MLA, HeadTransform, LayerKind, MoE, Patches, RotaryScaling, Series
from transformer.config.parts import Activation as Activation
from transformer.config.parts import FeedForwardActivation as FeedForwardActivation
from transformer.config.parts import Layer as Layer

__all__ = [
    "MLA",
    "AttentionOptions",
    "ConfigError",
    "EmbeddingOptions",
    "Execution",
    "HeadTransform",
    "LayerKind",
    "MoE",
    "OutputOptions",
    "Patches",
    "RotaryOptions",
    "RotaryScaling",
    "Series",
    "Speech",
    "StackOptions",
    "T5BiasOptions",
    "TransformerConfig",
    "gpt2_decoder",
    "llama_decoder",
    "transformer_base",
    "transformer_big",
]
