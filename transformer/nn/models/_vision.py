"""Models of images: classifiers and embedders."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._parts import Patches
from transformer.nn._axes import Array, Float, Hidden, Int
from transformer.nn._blocks import Aux, Block, LayerInputs, make_linear
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Encoder
from transformer.nn.models._base import Model
from transformer.nn.models._dynamic_images import AnyImages, ImagePatches
from transformer.nn.models._encoders import normalized, pool


def grid_positions(
    table: Float[Array, "S D"], stored: tuple[int, int], grid: Int[Array, "B 2"], length: int
) -> Float[Array, "B T D"]:
    """Interpolate positions (S, D), stored row by row for a grid of patches, for grids of other rows and columns.

    The interpolation is bilinear at the centers of patches, as in PyTorch with antialias: if a grid has fewer rows than
    the stored one, the triangle filter is wider by this ratio. The same holds for columns. The result is float32;
    padding, up to `length`, has the position of the first patch.
    """
    rows, columns = grid[:, :1], grid[:, 1:]
    index = jnp.arange(length)[None]
    index = jnp.where(index < rows * columns, index, 0)
    by_row = _bilinear_weights(index // columns, rows, stored[0])
    by_column = _bilinear_weights(index % columns, columns, stored[1])
    # The weight of the stored position (r, c) is w_r w_c: (B, T, rows) x (B, T, columns) -> (B, T, S).
    weights = (by_row[..., :, None] * by_column[..., None, :]).reshape(*index.shape, -1)  # (B, T, S)
    # HIGHEST: accelerators would otherwise round positions to fewer bits.
    return jnp.matmul(weights, table.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _bilinear_weights(index: Int[Array, "B T"], count: Int[Array, "B 1"], stored: int) -> Array:
    """Return the weights (B, T, stored) of `stored` values at the center of interval `index` of `count` intervals."""
    # Interval i of `count` has the center (i + 1/2) stored / count, in units of the stored intervals.
    stretch = stored / count.astype(jnp.float32)  # (B, 1)
    centers = ((index + 0.5) * stretch)[..., None]
    distances = jnp.abs(jnp.arange(stored)[None, None] + 0.5 - centers) / jnp.maximum(stretch, 1.0)[..., None]
    # Triangle filter 1 - |d|. With fewer intervals than stored ones (stretch above 1) it is wider by the stretch, so
    # each stored value still counts (antialiasing).
    weights = jnp.maximum(1.0 - distances, 0.0)
    # Values outside of the table do not exist, so the others are scaled to sum to 1.
    return weights / weights.sum(-1, keepdims=True)


def cut_patches(images: Array, patches: Patches) -> Array:
    """Cut images (B, height, width, C) into patches (B, T, p, p, C), row by row (Dosovitskiy et al. 2020)."""
    size = patches.patch_size
    rows, columns = images.shape[1] // size, images.shape[2] // size
    # (B, rows, p, columns, p, C) -> (B, rows, columns, p, p, C) -> (B, T, p, p, C)
    x = images[:, : rows * size, : columns * size]  # everything, unless the config drops the remainder
    x = x.reshape(-1, rows, size, columns, size, patches.channels).swapaxes(2, 3)
    return x.reshape(-1, rows * columns, size, size, patches.channels)


class AttentionPooling(Block):
    """Reduce a sequence to one vector, as SigLIP (Zhai et al. 2022, arXiv 2106.04560, section 3.5): attention of a
    learned `query` (D,), `cross_attention/`, then `feed_forward_norm/` and `feed_forward/`, with a residual.
    """

    parameter_axes = declare({"query": "norm"})

    @nn.compact
    def __call__(self, hidden: Hidden, deterministic: bool = True, mask: Mask | None = None) -> Float[Array, "B D"]:
        """Pool (B, T, D) to (B, D); `mask` marks the padding."""
        config = self.config
        query = self.param("query", nn.initializers.normal(0.02), (config.d_model,), config.parameters.dtype)
        # The learned query is the same for all sequences: (D,) -> (B, 1, D).
        x = jnp.broadcast_to(query.astype(hidden.dtype), (hidden.shape[0], 1, hidden.shape[2]))
        inputs = LayerInputs(context=hidden, context_mask=Mask.of(mask), deterministic=deterministic)
        x = self.attend_to_context(x, inputs, None).x  # no residual connection: the query itself is not part of it
        return (x + self.apply_feed_forward(self.norm("feed_forward_norm")(x), inputs).x)[:, 0]


class VisionEncoder(Model):
    """Base class of models of images: an encoder of learned tokens and patches, and pooling (Dosovitskiy et al. 2020).

    The paper is arXiv 2010.11929. Parameters in addition to those of the encoder: `patch_embedding/kernel` (p, p,
    channels, D) for patches of p x p pixels; `class_token` (D,), `distillation_token` (D,) and `registers` (R, D), if
    the config has them; `attention_pooling/` with the pooling "attention"; `position_table` (S, D) for S stored
    positions with `resize_positions`, where other models have it in `encoder/`.
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
        if patches.resize_positions and config.position is not None:
            raise ConfigError(
                f"input.resize_positions=True adds positions to the patches, got position={config.position} in "
                f"addition. Set position=None."
            )
        zeros, width, dtype = nn.initializers.zeros, (config.d_model,), config.parameters.dtype
        normal = nn.initializers.normal(config.parameters.initializer_range or 0.02)
        if patches.class_token:
            self.class_token = self.param("class_token", zeros, width, dtype)
        if patches.distillation_token:
            self.distillation_token = self.param("distillation_token", zeros, width, dtype)
        if patches.registers:
            self.registers = self.param("registers", normal, (patches.registers, *width), dtype)
        if patches.resize_positions:
            self.position_table = self.param("position_table", normal, (patches.count, *width), dtype)
        self.patch_embedding = make_linear(config, width, 3, use_bias=patches.use_bias)
        self.encoder = Encoder(config, causal=config.attention.causal, execution=self.execution)
        if pooling == "attention":
            self.attention_pooling = AttentionPooling(config, execution=self.execution)

    def __call__(self, images: AnyImages, deterministic: bool = True) -> Float[Array, "B C"]:
        """Apply `head` to the pooled encoding of images (B, height, width, channels).

        Images are floating-point, with the normalization that the model was trained with. With `resize_positions`,
        height and width are any multiples of the patch size, and `ImagePatches` are images of different sizes.

        Returns:
            (B, C), float32: logits of C classes, or an embedding.
        """
        return self.head(self.pooled(images, deterministic))

    def pooled(self, images: AnyImages, deterministic: bool = True) -> Float[Array, "B Do"]:
        """Return the pooled encoding (B, D) of images, the input of `head`; arguments as in a call."""
        return self.pool(self.hidden(images, deterministic), deterministic, _mask_of(images))

    def hidden(self, images: AnyImages, deterministic: bool = True) -> Hidden:
        """Encode images (B, height, width, channels) as (B, T, D), learned tokens first. Raises ValueError."""
        return self._run(images, deterministic)[0]

    def with_aux(self, images: AnyImages, deterministic: bool = True) -> tuple[Float[Array, "B C"], Aux]:
        """Return the output of a call and aux, the layers' terms of the training loss; arguments as in a call."""
        x, _, aux = self._run(images, deterministic)
        return self.head(self.pool(x, deterministic, _mask_of(images))), aux

    def _run(self, images, deterministic=True):
        patches = self.config.patches
        if patches.resize_positions:
            x = self._embed_any_grid(images)
            return self.encoder(x, mask=_mask_of(images), deterministic=deterministic)
        expected = (patches.image_height, patches.image_width, patches.channels)
        _check_pixels(images, expected, fits=getattr(images, "shape", ())[1:] == expected)
        # A linear map of each patch, (B, T, p, p, C) -> (B, T, D), equals a convolution with kernel size and stride p.
        x = self.patch_embedding(cut_patches(images, patches))
        # Learned tokens are the same for all images: (n, D) -> (B, n, D).
        tokens = [self.class_token[None]] if patches.class_token else []
        tokens += [self.distillation_token[None]] if patches.distillation_token else []
        tokens += [self.registers] if patches.registers else []
        first = [jnp.broadcast_to(token.astype(x.dtype)[None], (x.shape[0], *token.shape)) for token in tokens]
        return self.encoder(jnp.concatenate([*first, x], 1), deterministic=deterministic)

    def _embed_any_grid(self, images: AnyImages) -> Hidden:
        """Return the embeddings of patches (B, T, D) plus the positions, interpolated for each image."""
        patches = self.config.patches
        size, channels = patches.patch_size, patches.channels
        if not isinstance(images, ImagePatches):
            shape = images.shape
            fits = len(shape) == 4 and shape[3] == channels and min(shape[1:3]) > 0
            fits = fits and shape[1] % size == shape[2] % size == 0
            _check_pixels(images, (f"n x {size}", f"m x {size}", channels), fits=fits)
            grid = jnp.broadcast_to(jnp.asarray([shape[1] // size, shape[2] // size]), (shape[0], 2))
            images = ImagePatches(cut_patches(images, patches).reshape(shape[0], -1, size * size * channels), grid)
        values, grid = jnp.asarray(images.values), jnp.asarray(images.grid)
        width = size * size * channels
        shapes = values.ndim == 3 and values.shape[2] == width and grid.shape == (values.shape[0], 2)
        if not shapes or not jnp.issubdtype(values.dtype, jnp.floating) or not jnp.issubdtype(grid.dtype, jnp.integer):
            raise ValueError(
                f"ImagePatches must have floating-point values (batch, length, {width}) and an integer grid (batch, "
                f"2), got {values.dtype} of shape {values.shape} and {grid.dtype} of shape {grid.shape}. Use the "
                f"patch_size and channels of the model's config."
            )
        # (B, T, p p C) -> (B, T, p, p, C) -> (B, T, D)
        x = self.patch_embedding(values.reshape(*values.shape[:2], size, size, channels))
        return x + grid_positions(self.position_table, patches.grid, grid, values.shape[1]).astype(x.dtype)

    def pool(self, hidden: Hidden, deterministic: bool = True, mask: Mask | None = None) -> Float[Array, "B Do"]:
        """Pool (B, T, D) to (B, D), or to (B, 2 D) with "first_and_mean"; the mean is that of the patches."""
        # `mask` marks padding, which only models without learned tokens can have.
        pooling, extra = self.config.output.pooling, self.config.patches.extra_tokens
        if pooling == "attention":
            return self.attention_pooling(hidden, deterministic, mask)
        if pooling == "first":
            return hidden[:, 0]
        mean = pool(hidden[:, extra:], mask, "mean") if mask is not None else hidden[:, extra:].mean(1)
        return mean if pooling == "mean" else jnp.concatenate([hidden[:, 0], mean], -1)


def _mask_of(images: AnyImages) -> Mask | None:
    return images.mask if isinstance(images, ImagePatches) else None


def _check_pixels(images: AnyImages, expected: tuple[int | str, ...], *, fits: bool) -> None:
    if isinstance(images, ImagePatches):
        raise ValueError(
            "the model reads images of one size, got ImagePatches. Pass pixels (batch, "
            f"{', '.join(map(str, expected))}), or use a model with resize_positions=True."
        )
    if not fits or not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"images must be floating-point of shape (batch, {', '.join(map(str, expected))}): batch, height, "
            f"width, channels; got {images.dtype} of shape {images.shape}. For a single image, pass image[None]."
        )


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
        ConfigError: as a VisionClassifier, or if the config has no distillation token or a pooling other than "first".
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
        self.distillation_output = make_linear(config, (config.output.num_classes,), use_bias=True)

    def pool(self, hidden: Hidden, deterministic: bool = True, mask: Mask | None = None) -> Float[Array, "B Do"]:
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
