"""Configs of the encoders of images inside models that also read tokens."""

from __future__ import annotations

from typing import Any

from transformer.config._checks import ConfigError
from transformer.config._image_tokens import DynamicImageTokens
from transformer.config._layer_patterns import fold
from transformer.config._model import TransformerConfig
from transformer.config._parts import Images, LayerKind


def image_encoder(config: TransformerConfig) -> TransformerConfig:
    """Return the config of the image encoder of a DualEncoder or a VisionLanguageModel.

    Raises:
        ConfigError: the input is not images in addition to or between tokens.
    """
    images = config.images or config.image_tokens or config.dynamic_images
    if images is None:
        raise ConfigError("input is not images: a DualEncoder needs input=Images(patches=..., features=..., ...).")
    alike: dict[str, Any] = {
        "d_model": images.d_model,
        "num_heads": images.num_heads,
        "d_ff": images.d_ff,
        "activation": images.activation,
        "norm_epsilon": images.norm_epsilon,
        "dropout_rate": config.dropout_rate,
        "attention.dropout_rate": config.attention.dropout_rate,
        "initializer_range": config.initializer_range,
        "dtype": config.dtype,
        "param_dtype": config.param_dtype,
    }
    if isinstance(images, DynamicImageTokens):
        return TransformerConfig(**alike, **_dynamic(images))
    dual = isinstance(images, Images)
    unused = None if dual else images.unused_layers
    return TransformerConfig(
        **alike,
        num_layers=images.num_layers - (unused or 0),
        norm=config.norm if dual else "layer_norm",
        position="none" if images.patches.resize_positions else "learned",
        max_length=None if images.patches.resize_positions else images.patches.positions,
        input=images.patches,
        **{
            "embedding.norm": images.embedding_norm,
            "stack.final_norm": unused is None,
            "output.pooling": images.pooling if dual else "mean",
        },
    )


def _dynamic(images: DynamicImageTokens) -> dict[str, Any]:
    """Return the fields that only the encoder of images of any size has."""
    pairs = images.d_model // images.num_heads // 4
    kinds = [
        LayerKind(within_segments=images.window_size is not None and i not in images.full_attention_layers)
        for i in range(images.num_layers)
    ]
    return {
        "num_layers": images.num_layers,
        "gated": images.gated,
        "norm": images.norm,
        "position": "rotary",
        # Half of the pairs of a head by the row of a patch, half by its column.
        "rotary.sections": (pairs, pairs),
        "rotary.restart_frequencies": True,
        **fold(kinds),
    }
