"""A model zoo of transformers in JAX and Flax: pure functions for numerics, small modules that own the parameters."""

from transformer.attention import MultiHeadAttention, dot_product_attention
from transformer.blocks import LayerInputs, PostNormBlock, PreNormBlock
from transformer.caches import KVCache
from transformer.config import (
    MLA,
    ConfigError,
    Execution,
    HeadTransform,
    LayerKind,
    MoE,
    Patches,
    RotaryScaling,
    Series,
    TransformerConfig,
    transformer_base,
    transformer_big,
)
from transformer.masks import Mask
from transformer.models import (
    CausalLM,
    Classifier,
    Embedder,
    Forecaster,
    MaskedLM,
    Seq2Seq,
    SpeechToText,
    VisionClassifier,
)
from transformer.positions import ALiBi, Learned, NoPosition, Rotary, Sinusoidal, SinusoidalHalves, T5Bias
from transformer.stacks import Decoder, Encoder

__version__ = "0.1.0"

__all__ = [
    "MLA",
    "ALiBi",
    "CausalLM",
    "Classifier",
    "ConfigError",
    "Decoder",
    "Embedder",
    "Encoder",
    "Execution",
    "Forecaster",
    "HeadTransform",
    "KVCache",
    "LayerInputs",
    "LayerKind",
    "Learned",
    "Mask",
    "MaskedLM",
    "MoE",
    "MultiHeadAttention",
    "NoPosition",
    "Patches",
    "PostNormBlock",
    "PreNormBlock",
    "Rotary",
    "RotaryScaling",
    "Seq2Seq",
    "Series",
    "Sinusoidal",
    "SinusoidalHalves",
    "SpeechToText",
    "T5Bias",
    "TransformerConfig",
    "VisionClassifier",
    "dot_product_attention",
    "load",
    "save",
    "transformer_base",
    "transformer_big",
]


def __getattr__(name: str):
    """`load` and `save` need extras (`train` for workdirs, `zoo` for pretrained weights): imported when asked for."""
    if name in ("load", "save"):
        from transformer import inference

        return {"load": inference.load, "save": inference.save}[name]
    raise AttributeError(f"module 'transformer' has no attribute {name!r}")
