"""Linear maps with their quantized and adapted kernels, norms, feed-forward networks and embeddings."""

from transformer.nn.layers._int8 import quantize
from transformer.nn.layers._layers import FeedForward, LayerNorm

__all__ = ["FeedForward", "LayerNorm", "quantize"]
