"""The image classifier."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._parts import Patches
from transformer.nn._axes import Array, Float, Hidden
from transformer.nn._blocks import Aux, kernel_init
from transformer.nn._layers import Linear
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Encoder
from transformer.nn.models._base import Model


def cut_patches(images: Array, patches: Patches) -> Array:
    """Cut images (B, height, width, channels) into patches (B, T, p, p, channels), row by row.

    This is the input of a vision transformer (Dosovitskiy et al. 2020, section 3.1).
    """
    size = patches.patch_size
    rows, columns = patches.image_height // size, patches.image_width // size
    # (B, rows, p, columns, p, C) -> (B, rows, columns, p, p, C) -> (B, T, p, p, C)
    x = images.reshape(-1, rows, size, columns, size, patches.channels).swapaxes(2, 3)
    return x.reshape(-1, rows * columns, size, size, patches.channels)


class VisionClassifier(Model):
    """A vision transformer: an encoder of a class token and image patches, then a classifier (Dosovitskiy et al. 2020).

    The paper is arXiv 2010.11929. Parameters in addition to those of a Classifier: `class_token` (D,) and
    `patch_embedding/kernel` (p, p, channels, D) for patches of p x p pixels.

    Raises:
        ConfigError: if the config has no patches or no num_classes, or if its pooling is "last".
    """

    parameter_axes = declare({"patch_embedding/kernel": "_ _ _ -> embed", "class_token": "embed"}, role="input")

    def setup(self):
        config = self.config
        for field, value in {"input": config.patches, "output.num_classes": config.output.num_classes}.items():
            if value is None:
                raise ConfigError(f"{field} is not set: a VisionClassifier needs image patches and classes. Set both.")
        if config.output.pooling == "last":
            raise ConfigError(
                "output.pooling must be 'first' (the class token) or 'mean' (the mean of the patches) for a "
                "VisionClassifier, got 'last'. Change it."
            )
        init, use_bias = kernel_init(config), config.patches.use_bias
        self.class_token = self.param("class_token", nn.initializers.zeros, (config.d_model,), config.param_dtype)
        self.patch_embedding = Linear((config.d_model,), 3, use_bias, init, config.dtype, config.param_dtype)
        self.encoder = Encoder(config, causal=config.attention.causal, execution=self.execution)
        self._setup_head(config.output.num_classes, tied=False, use_bias=True)

    def __call__(self, images: Array, deterministic: bool = True) -> Float[Array, "B C"]:
        """Compute class logits (B, C), float32, from images (B, height, width, channels).

        Images are floating-point, with the normalization that the model was trained with.
        """
        return self.head(self.pool(self.hidden(images, deterministic)))

    def hidden(self, images: Array, deterministic: bool = True) -> Hidden:
        """Encode images (B, height, width, channels) as (B, 1 + patches, D), with the class token first.

        Raises:
            ValueError: if the images have another shape or are not floating-point.
        """
        return self._run(images, deterministic)[0]

    def with_aux(self, images: Array, deterministic: bool = True) -> tuple[Float[Array, "B C"], Aux]:
        """Return class logits (B, C) and aux, the layers' terms of the training loss; arguments as in a call."""
        x, _, aux = self._run(images, deterministic)
        return self.head(self.pool(x)), aux

    def _run(self, images, deterministic=True):
        patches = self.config.patches
        expected = (patches.image_height, patches.image_width, patches.channels)
        if images.ndim != 4 or images.shape[1:] != expected or not jnp.issubdtype(images.dtype, jnp.floating):
            raise ValueError(
                f"images must be floating-point of shape (batch, {', '.join(map(str, expected))}): batch, height, "
                f"width, channels; got {images.dtype} of shape {images.shape}. For a single image, pass image[None]."
            )
        # A linear map of each flattened patch: (B, T, p, p, C) -> (B, T, D).
        x = self.patch_embedding(cut_patches(images, patches))
        # The class token is a learned vector, the same for all images: (D,) -> (B, 1, D).
        first = jnp.broadcast_to(self.class_token.astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        return self.encoder(jnp.concatenate([first, x], 1), deterministic=deterministic)

    def pool(self, hidden: Hidden) -> Float[Array, "B D"]:
        """Pool (B, 1 + patches, D) to (B, D): the class token, or the mean of the patches without it."""
        return hidden[:, 0] if self.config.output.pooling == "first" else hidden[:, 1:].mean(1)

    def head(self, pooled: Float[Array, "B D"]) -> Float[Array, "B C"]:
        """Compute class logits (B, C), float32, from pooled vectors (B, D)."""
        return self.output(self._before_output(pooled)).astype(jnp.float32)
