"""Model configs of published papers."""

from __future__ import annotations

from transformer.config._model import TransformerConfig
from transformer.config._options import EmbeddingOptions, FeedForwardOptions, NormOptions, ParameterOptions
from transformer.config._positions import LearnedOptions, RotaryOptions


def transformer_base(**changes: object) -> TransformerConfig:
    """Return the base model of Vaswani et al. 2017 (arXiv 1706.03762, table 3): 6 layers, d_model 512, 8 heads,
    d_ff 2048, dropout 0.1.
    """
    return _PAPER.replace(**changes)


def transformer_big(**changes: object) -> TransformerConfig:
    """Return the big model of Vaswani et al. 2017 (arXiv 1706.03762, table 3): 6 layers, d_model 1024, 16 heads,
    d_ff 4096, dropout 0.3.
    """
    return _PAPER.replace(
        **{"d_model": 1024, "num_heads": 16, "feed_forward.d_ff": 4096, "dropout_rate": 0.3} | changes
    )


def gpt2_decoder(**changes: object) -> TransformerConfig:
    """Return the decoder of GPT-2 (Radford et al. 2019): learned positions, 1,024 tokens.

    Pass sizes as `changes`: `gpt2_decoder(d_model=768, **{"feed_forward.d_ff": 3072})` keeps the activation.
    """
    return _GPT2.replace(**changes)


def llama_decoder(**changes: object) -> TransformerConfig:
    """Return the decoder of Llama (Touvron et al. 2023, arXiv 2302.13971): RMSNorm, rotary positions, gated SiLU, no
    biases, untied embeddings.

    Pass sizes as `changes`: `llama_decoder(d_model=768, **{"feed_forward.d_ff": 2048})` keeps activation and gate.
    """
    return _LLAMA.replace(**changes)


_PAPER = TransformerConfig(
    d_model=512,
    num_layers=6,
    num_heads=8,
    feed_forward=FeedForwardOptions(d_ff=2048, activation="relu"),
    norm=NormOptions(kind="layer_norm", position="post"),
    dropout_rate=0.1,
)

_GPT2 = TransformerConfig(
    feed_forward=FeedForwardOptions(activation="gelu_tanh"),
    norm=NormOptions(epsilon=1e-5),
    position=LearnedOptions(max_length=1024),
    parameters=ParameterOptions(initializer_range=0.02),
    embedding=EmbeddingOptions(scale=False),
)

_LLAMA = TransformerConfig(
    feed_forward=FeedForwardOptions(activation="silu", gated=True),
    parameters=ParameterOptions(use_bias=False, initializer_range=0.02),
    norm=NormOptions(kind="rms_norm", epsilon=1e-5),
    position=RotaryOptions(),
    embedding=EmbeddingOptions(scale=False, tie=False),
)
