"""Models of images: classifiers and embedders."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._parts import Patches
from transformer.nn._axes import Array, Float, Hidden
from transformer.nn._blocks import Aux, Block, LayerInputs, kernel_init
from transformer.nn._layers import Linear
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Encoder
from transformer.nn.models._base import Model
from transformer.nn.models._encoders import normalized


def cut_patches(images: Array, patches: Patches) -> Array:
    """Cut images (B, height, width, channels) into patches (B, T, p, p, channels), row by row.

    This is the input of a vision transformer (Dosovitskiy et al. 2020, section 3.1).
    """
    size = patches.patch_size
    rows, columns = patches.grid
    # (B, rows, p, columns, p, C) -> (B, rows, columns, p, p, C) -> (B, T, p, p, C)
    x = images[:, : rows * size, : columns * size]  # everything, unless the config drops the remainder
    x = x.reshape(-1, rows, size, columns, size, patches.channels).swapaxes(2, 3)
    return x.reshape(-1, rows * columns, size, size, patches.channels)


class AttentionPooling(Block):
    """Reduce a sequence to one vector: attention of a learned query, then a feed-forward layer with a residual.

    This is the pooling of SigLIP (Zhai et al. 2022, arXiv 2106.04560, section 3.5; Lee et al. 2019, arXiv 1810.00825).
    Parameters: `query` (D,), `cross_attention/`, `feed_forward_norm/` and `feed_forward/`.
    """

    parameter_axes = declare({"query": "norm"})

    @nn.compact
    def __call__(self, hidden: Hidden, deterministic: bool = True) -> Float[Array, "B D"]:
        """Pool (B, T, D) to (B, D)."""
        config = self.config
        query = self.param("query", nn.initializers.normal(0.02), (config.d_model,), config.param_dtype)
        # The learned query is the same for all sequences: (D,) -> (B, 1, D).
        x = jnp.broadcast_to(query.astype(hidden.dtype), (hidden.shape[0], 1, hidden.shape[2]))
        inputs = LayerInputs(context=hidden, deterministic=deterministic)
        x, _ = self.attend_to_context(x, inputs, None)  # no residual connection: the query itself is not part of it
        y, _ = self.apply_feed_forward(self.norm("feed_forward_norm")(x), inputs)
        return (x + y)[:, 0]


class VisionEncoder(Model):
    """Base class of models of images: an encoder of learned tokens and patches, and pooling (Dosovitskiy et al. 2020).

    The paper is arXiv 2010.11929. Parameters in addition to those of the encoder: `patch_embedding/kernel` (p, p,
    channels, D) for patches of p x p pixels; `class_token` (D,), `distillation_token` (D,) and `registers` (R, D), if
    the config has them; `attention_pooling/` with the pooling "attention".
    """

    parameter_axes = declare(
        {"patch_embedding/kernel": "_ _ _ -> embed"}
        | {"class_token": "embed", "distillation_token": "embed", "registers": "_ embed"},
        role="input",
    )

    def _setup_images(self) -> None:
        config, patches, pooling = self.config, self.config.patches, self.config.output.pooling
        if patches is None:
            raise ConfigError(f"input is not set: a {type(self).__name__} needs image patches. Set it to Patches(...).")
        if pooling == "last":
            raise ConfigError(
                f"output.pooling must be 'first' (the class token) or 'mean' (the mean of the patches), "
                f"'first_and_mean' or 'attention' for a {type(self).__name__}, got 'last'. Change it."
            )
        if pooling in ("first", "first_and_mean") and not patches.class_token:
            raise ConfigError(
                f"output.pooling={pooling!r} reads the class token, but input.class_token is False. Change one of them."
            )
        zeros, width = nn.initializers.zeros, (config.d_model,)
        if patches.class_token:
            self.class_token = self.param("class_token", zeros, width, config.param_dtype)
        if patches.distillation_token:
            self.distillation_token = self.param("distillation_token", zeros, width, config.param_dtype)
        if patches.registers:
            init, shape = nn.initializers.normal(config.initializer_range or 0.02), (patches.registers, config.d_model)
            self.registers = self.param("registers", init, shape, config.param_dtype)
        self.patch_embedding = Linear(width, 3, patches.use_bias, kernel_init(config), config.dtype, config.param_dtype)
        self.encoder = Encoder(config, causal=config.attention.causal, execution=self.execution)
        if pooling == "attention":
            self.attention_pooling = AttentionPooling(config, execution=self.execution)

    def __call__(self, images: Array, deterministic: bool = True) -> Float[Array, "B C"]:
        """Apply `head` to the pooled encoding of images (B, height, width, channels).

        Images are floating-point, with the normalization that the model was trained with.

        Returns:
            (B, C), float32: logits of C classes, or an embedding.
        """
        hidden = self.hidden(images, deterministic)
        return self.head(self.pool(hidden, deterministic))

    def hidden(self, images: Array, deterministic: bool = True) -> Hidden:
        """Encode images (B, height, width, channels) as (B, T, D): learned tokens, then patches.

        Raises:
            ValueError: if the images have another shape or are not floating-point.
        """
        return self._run(images, deterministic)[0]

    def with_aux(self, images: Array, deterministic: bool = True) -> tuple[Float[Array, "B C"], Aux]:
        """Return the output of a call and aux, the layers' terms of the training loss; arguments as in a call."""
        x, _, aux = self._run(images, deterministic)
        return self.head(self.pool(x, deterministic)), aux

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
        # Learned tokens are the same for all images: (n, D) -> (B, n, D).
        tokens = [self.class_token[None]] if patches.class_token else []
        tokens += [self.distillation_token[None]] if patches.distillation_token else []
        tokens += [self.registers] if patches.registers else []
        first = [jnp.broadcast_to(token.astype(x.dtype)[None], (x.shape[0], *token.shape)) for token in tokens]
        return self.encoder(jnp.concatenate([*first, x], 1), deterministic=deterministic)

    def pool(self, hidden: Hidden, deterministic: bool = True) -> Float[Array, "B Do"]:
        """Pool (B, T, D) to (B, D), or to (B, 2 D) with the pooling "first_and_mean".

        The mean is that of the patches, without the learned tokens.
        """
        pooling, extra = self.config.output.pooling, self.config.patches.extra_tokens
        if pooling == "attention":
            return self.attention_pooling(hidden, deterministic)
        if pooling == "first":
            return hidden[:, 0]
        mean = hidden[:, extra:].mean(1)
        return mean if pooling == "mean" else jnp.concatenate([hidden[:, 0], mean], -1)


class VisionClassifier(VisionEncoder):
    """A vision transformer that classifies images (Dosovitskiy et al. 2020, arXiv 2010.11929).

    Raises:
        ConfigError: if the config has no patches or no num_classes, or a pooling that images do not have.
    """

    def setup(self):
        config = self.config
        for field, value in {"input": config.patches, "output.num_classes": config.output.num_classes}.items():
            if value is None:
                raise ConfigError(
                    f"{field} is not set: a {type(self).__name__} needs image patches and classes. Set both."
                )
        self._setup_images()
        self._setup_head(config.output.num_classes, tied=False, use_bias=True)

    def head(self, pooled: Float[Array, "B Do"]) -> Float[Array, "B C"]:
        """Compute class logits (B, C), float32, from pooled vectors."""
        return self.output(self._before_output(pooled)).astype(jnp.float32)


class DistilledVisionClassifier(VisionClassifier):
    """A vision classifier with a second classifier on the distillation token; the logits are their mean.

    This is DeiT (Touvron et al. 2020, arXiv 2012.12877, section 4). Parameters in addition to those of a
    VisionClassifier: `distillation_output/`.

    Raises:
        ConfigError: as a VisionClassifier, or if the config has no distillation token or another pooling than "first".
    """

    parameter_axes = declare(
        {"distillation_output/kernel": "embed -> vocab", "distillation_output/bias": "vocab"}, role="output", int8=True
    )

    def setup(self):
        super().setup()
        config = self.config
        if not config.patches.distillation_token or config.output.pooling != "first":
            raise ConfigError(
                "a DistilledVisionClassifier needs input.distillation_token=True and output.pooling='first'. Set both."
            )
        features, types = (config.output.num_classes,), (config.dtype, config.param_dtype)
        self.distillation_output = Linear(features, 1, True, kernel_init(config), *types)

    def pool(self, hidden: Hidden, deterministic: bool = True) -> Float[Array, "B Do"]:
        """Concatenate the class token and the distillation token: (B, T, D) -> (B, 2 D)."""
        return jnp.concatenate([hidden[:, 0], hidden[:, 1]], -1)

    def head(self, pooled: Float[Array, "B Do"]) -> Float[Array, "B C"]:
        """Compute class logits (B, C), float32, the mean of both classifiers."""
        first, second = jnp.split(self._before_output(pooled), 2, axis=-1)
        # In float32, so that the mean is not rounded to bfloat16.
        both = self.output(first).astype(jnp.float32), self.distillation_output(second).astype(jnp.float32)
        return (both[0] + both[1]) / 2


class VisionEmbedder(VisionEncoder):
    """A vision transformer whose pooled output is an embedding of the image.

    The config's `head_transform`, if set, is applied to the pooled vector; `output.normalize` scales it to length 1.

    Raises:
        ConfigError: if the config has no patches, or a pooling that images do not have.
    """

    def setup(self):
        self._setup_images()
        self._setup_transform()

    def head(self, pooled: Float[Array, "B Do"]) -> Float[Array, "B Do"]:
        """Compute embeddings, float32, from pooled vectors."""
        vectors = self._transformed(pooled).astype(jnp.float32)
        return normalized(vectors) if self.config.output.normalize else vectors
