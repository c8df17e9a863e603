"""A model zoo of transformers in JAX and Flax: pure functions for numerics, small modules that own the parameters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from transformer.inference import load, save
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
    from transformer.partitioning import axis_rules
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
    "axis_rules",
    "dot_product_attention",
    "load",
    "save",
    "transformer_base",
    "transformer_big",
]

_HOMES = {
    "attention": "MultiHeadAttention dot_product_attention",
    "blocks": "LayerInputs PostNormBlock PreNormBlock",
    "caches": "KVCache",
    "compat": "",
    "config": "MLA ConfigError Execution HeadTransform LayerKind MoE Patches RotaryScaling Series TransformerConfig "
    "transformer_base transformer_big",
    "inference": "load save",
    "masks": "Mask",
    "models": "CausalLM Classifier Embedder Forecaster MaskedLM Seq2Seq SpeechToText VisionClassifier",
    "partitioning": "axis_rules",
    "positions": "ALiBi Learned NoPosition Rotary Sinusoidal SinusoidalHalves T5Bias",
    "stacks": "Decoder Encoder",
}
"""the names above by the file or folder of each. `load` and `save` need extras: `train` for workdirs, `zoo` for
pretrained weights."""


def __getattr__(name: str) -> Any:
    """Imports a name when it is asked for: the command line, which starts itself twice, does without JAX until then."""
    if name in _HOMES:
        return importlib.import_module(f"transformer.{name}")
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"transformer.{home}"), name)
    raise AttributeError(f"module 'transformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
