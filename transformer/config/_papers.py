"""Models as papers print them."""

from __future__ import annotations

from transformer.config._model import TransformerConfig


def transformer_base(**changes: object) -> TransformerConfig:
    """The base model of Vaswani et al. 2017 (arXiv 1706.03762, table 3): N = 6, 512 / 8 / 2048, dropout 0.1."""
    return _PAPER.replace(**changes)


def transformer_big(**changes: object) -> TransformerConfig:
    """The big model of Vaswani et al. 2017 (arXiv 1706.03762, table 3): N = 6, 1024 / 16 / 4096, dropout 0.3."""
    return _PAPER.replace(**{"d_model": 1024, "num_heads": 16, "d_ff": 4096, "dropout_rate": 0.3} | changes)


_PAPER = TransformerConfig(
    d_model=512,
    num_layers=6,
    num_heads=8,
    d_ff=2048,
    activation="relu",
    norm="layer_norm",
    norm_position="post",
    position="sinusoidal",
    scale_embeddings=True,
    tie_embeddings=True,
    dropout_rate=0.1,
)
