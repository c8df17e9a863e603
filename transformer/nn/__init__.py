"""Building blocks of transformers and complete models: pure functions for numerics, Flax modules that own parameters.

This package requires only jax, flax, numpy and jaxtyping.
"""

from transformer.nn import compat
from transformer.nn._attention import MultiHeadAttention, dot_product_attention
from transformer.nn._blocks import LayerInputs, PostNormBlock, PreNormBlock
from transformer.nn._caches import KVCache
from transformer.nn._delta_net import GatedDeltaNet
from transformer.nn._masks import Mask
from transformer.nn._paged import PagedKVCache, copy_pages, paged_cache, set_rows
from transformer.nn._partitioning import axis_rules
from transformer.nn._positions import (
    ALiBi,
    Learned,
    NoPosition,
    PositionScheme,
    Rotary,
    Sinusoidal,
    SinusoidalHalves,
    T5Bias,
)
from transformer.nn._sharding import (
    AXES,
    DcnConfig,
    ParallelConfig,
    batch_sharding,
    make_mesh,
    mesh_sizes,
    state_shardings,
    with_logical_axes,
)
from transformer.nn._stacks import Decoder, Encoder
from transformer.nn.layers._layers import FeedForward
from transformer.nn.layers._norms import LayerNorm
from transformer.nn.models._audio import SpeechEncoder, SpeechRecognizer
from transformer.nn.models._base import count_parameters
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._dual import DualEncoder
from transformer.nn.models._dynamic_images import ImagePatches
from transformer.nn.models._encoders import Classifier, Embedder, MaskedLM
from transformer.nn.models._forecaster import Forecaster, SeriesEncoder
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._series import PatchReconstructor, SeriesClassifier, SeriesRegressor
from transformer.nn.models._speech import SpeechToText
from transformer.nn.models._vision import DistilledVisionClassifier, VisionClassifier, VisionEmbedder
from transformer.nn.models._vision_language import VisionLanguageModel
from transformer.nn.quantization._int8 import quantize

__all__ = [
    "AXES",
    "ALiBi",
    "CausalLM",
    "Classifier",
    "DcnConfig",
    "Decoder",
    "DistilledVisionClassifier",
    "DualEncoder",
    "Embedder",
    "Encoder",
    "FeedForward",
    "Forecaster",
    "GatedDeltaNet",
    "ImagePatches",
    "KVCache",
    "LayerInputs",
    "LayerNorm",
    "Learned",
    "Mask",
    "MaskedLM",
    "MultiHeadAttention",
    "NoPosition",
    "PagedKVCache",
    "ParallelConfig",
    "PatchReconstructor",
    "PositionScheme",
    "PostNormBlock",
    "PreNormBlock",
    "Rotary",
    "Seq2Seq",
    "SeriesClassifier",
    "SeriesEncoder",
    "SeriesRegressor",
    "Sinusoidal",
    "SinusoidalHalves",
    "SpeechEncoder",
    "SpeechRecognizer",
    "SpeechToText",
    "T5Bias",
    "VisionClassifier",
    "VisionEmbedder",
    "VisionLanguageModel",
    "axis_rules",
    "batch_sharding",
    "compat",
    "copy_pages",
    "count_parameters",
    "dot_product_attention",
    "make_mesh",
    "mesh_sizes",
    "paged_cache",
    "quantize",
    "set_rows",
    "state_shardings",
    "with_logical_axes",
]
