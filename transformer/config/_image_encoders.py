"""Configs of the encoders of images inside models that also read tokens."""

from __future__ import annotations

from typing import Any

from transformer.config._image_tokens import DynamicImageTokens, ImageTokens
from transformer.config._layer_patterns import fold
from transformer.config._parts import Images, LayerKind
from transformer.config._positions import LearnedOptions, RotaryOptions


def encoder_fields(images: Images | ImageTokens | DynamicImageTokens, norm: str) -> dict[str, Any]:
    """Return the fields of the config of an image encoder.

    Args:
        images: the input that describes the encoder.
        norm: norm of the model, which the image encoder of a DualEncoder shares.
    """
    shared = {
        "d_model": images.d_model,
        "num_heads": images.num_heads,
        "d_ff": images.d_ff,
        "activation": images.activation,
        "norm_epsilon": images.norm_epsilon,
    }
    if isinstance(images, DynamicImageTokens):
        return shared | _dynamic(images)
    dual = isinstance(images, Images)
    unused = None if dual else images.unused_layers
    return shared | {
        "num_layers": images.num_layers - (unused or 0),
        "norm": norm if dual else "layer_norm",
        "position": None if images.patches.resize_positions else LearnedOptions(),
        "input": images.patches,
        "embedding.norm": images.embedding_norm,
        "stack.final_norm": unused is None,
        "output.pooling": images.pooling if dual else "mean",
    }


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
        # Half of the pairs of a head by the row of a patch, half by its column.
        "position": RotaryOptions(sections=(pairs, pairs), restart_frequencies=True),
        **fold(kinds),
    }
