"""A model zoo of transformers in JAX and Flax: pure functions for numerics, small modules that own the parameters."""

from transformer.attention import KVCache, MultiHeadAttention, dot_product_attention
from transformer.blocks import LayerInputs, PostNormBlock, PreNormBlock
from transformer.config import (
    ConfigError,
    Execution,
    LayerKind,
    MoE,
    RotaryScaling,
    TransformerConfig,
    transformer_base,
    transformer_big,
)
from transformer.masks import Mask
from transformer.models import CausalLM, Classifier, Seq2Seq
from transformer.positions import ALiBi, Learned, NoPosition, Rotary, Sinusoidal, T5Bias
from transformer.stacks import Decoder, Encoder

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "CausalLM",
    "Classifier",
    "ConfigError",
    "Decoder",
    "Encoder",
    "Execution",
    "KVCache",
    "LayerInputs",
    "LayerKind",
    "Learned",
    "Mask",
    "MoE",
    "MultiHeadAttention",
    "NoPosition",
    "PostNormBlock",
    "PreNormBlock",
    "Rotary",
    "RotaryScaling",
    "Seq2Seq",
    "Sinusoidal",
    "T5Bias",
    "TransformerConfig",
    "dot_product_attention",
    "load",
    "transformer_base",
    "transformer_big",
]


def __getattr__(name: str):
    """`load` reads what a training run left and needs the extras of `train`: imported when asked for."""
    if name == "load":
        from transformer.training.runs import load

        return load
    raise AttributeError(f"module 'transformer' has no attribute {name!r}")
