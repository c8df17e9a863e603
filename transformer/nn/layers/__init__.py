"""Linear maps, norms, feed-forward networks and embeddings."""

from transformer.nn.layers._layers import FeedForward
from transformer.nn.layers._norms import LayerNorm

__all__ = ["FeedForward", "LayerNorm"]
