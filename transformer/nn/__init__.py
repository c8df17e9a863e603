"""What models are made of, and whole models: pure functions for numerics, Flax modules that own the parameters.

Nothing here needs more than jax, flax, numpy and jaxtyping.
"""

from transformer.nn.attention import MultiHeadAttention, dot_product_attention
from transformer.nn.blocks import LayerInputs, PostNormBlock, PreNormBlock
from transformer.nn.caches import KVCache
from transformer.nn.masks import Mask
from transformer.nn.models import (
    CausalLM,
    Classifier,
    Embedder,
    Forecaster,
    MaskedLM,
    Seq2Seq,
    SpeechToText,
    VisionClassifier,
)
from transformer.nn.partitioning import axis_rules
from transformer.nn.positions import ALiBi, Learned, NoPosition, Rotary, Sinusoidal, SinusoidalHalves, T5Bias
from transformer.nn.stacks import Decoder, Encoder

__all__ = [
    "ALiBi",
    "CausalLM",
    "Classifier",
    "Decoder",
    "Embedder",
    "Encoder",
    "Forecaster",
    "KVCache",
    "LayerInputs",
    "Learned",
    "Mask",
    "MaskedLM",
    "MultiHeadAttention",
    "NoPosition",
    "PostNormBlock",
    "PreNormBlock",
    "Rotary",
    "Seq2Seq",
    "Sinusoidal",
    "SinusoidalHalves",
    "SpeechToText",
    "T5Bias",
    "VisionClassifier",
    "axis_rules",
    "dot_product_attention",
]
