"""Images of any size between the tokens of a decoder: their patches, encoder, tokens and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._execution import Execution
from transformer.config._model import DynamicImageTokens, TransformerConfig
from transformer.nn._axes import Array, Bool, Float, Int, Leaf
from transformer.nn._blocks import Aux, kernel_init, make_linear
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Encoder
from transformer.nn.layers._layers import ACTIVATIONS, Linear

SMALLEST = 64
"""smallest padded number of patches of an image"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ImagePatches:
    """Patches of images of different sizes, padded to the same number P.

    For a `VisionLanguageModel`, each row of a batch has I images. The patches are in the order of the tokens: first the
    merge x merge patches of the first token, row by row. `of` makes them from images. For an encoder with
    `Patches.resize_positions` (SigLIP 2, Tschannen et al. 2025, arXiv 2502.14786, section 2.4), there is one image for
    each row, without the axis I, and the patches are row by row: `media.ImageProcessor.flat_patches` gives them.
    """

    values: Leaf
    """(B, I, P, p p channels) or (B, P, p p channels), floating-point: patches of p x p pixels, then padding"""
    grid: Leaf
    """(B, I, 2) or (B, 2), integers: rows and columns of patches of each image; 0 and 0: no image"""

    @property
    def mask(self) -> Mask:
        """Marks the padding of images without the axis I."""
        return Mask.lengths(jnp.asarray(self.grid).prod(-1))

    @staticmethod
    def of(images: Sequence[Sequence[np.ndarray]], config: DynamicImageTokens) -> ImagePatches:
        """Return the patches of images (height, width, channels), a list for each row.

        The number of patches is rounded up to a power of two, so that few shapes are compiled.

        Raises:
            ValueError: there are no images, or the sides of one are not multiples of `config.multiple`.
        """
        for row in images:
            for image in row:
                check_image(image, config)
        cut = [[_cut(image, config) for image in row] for row in images]
        most = max(map(len, cut), default=0)
        if most == 0:
            raise ValueError("there are no images. Pass at least one.")
        longest = max(len(patches) for row in cut for patches, _ in row)
        length = max(SMALLEST, config.merge**2, 1 << (longest - 1).bit_length())
        # Whole tokens of merge x merge patches
        length = -(-length // config.merge**2) * config.merge**2
        values = np.zeros((len(images), most, length, config.patch_size**2 * config.channels), np.float32)
        grid = np.zeros((len(images), most, 2), np.int32)
        for i, row in enumerate(cut):
            for j, (patches, sides) in enumerate(row):
                values[i, j, : len(patches)], grid[i, j] = patches, sides
        return ImagePatches(values, grid)


AnyImages: TypeAlias = Array | ImagePatches
"""images (B, height, width, channels) of one size, floating-point, or patches of images of any size"""


def check_image(image: np.ndarray, config: DynamicImageTokens) -> None:
    """Raise ValueError unless an image is (height, width, channels) with sides that are multiples of a token's."""
    shape, each = np.shape(image), config.multiple
    if len(shape) != 3 or shape[2] != config.channels or 0 in shape or shape[0] % each or shape[1] % each:
        raise ValueError(
            f"an image must be an array (height, width, channels) with {config.channels} channels, and a height and a "
            f"width that are multiples of {each}, got shape {shape}. Apply the preprocessing of the model."
        )


def _cut(image: np.ndarray, config: DynamicImageTokens) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the patches (P, p p channels) of an image (height, width, channels), and its rows and columns."""
    size, merge = config.patch_size, config.merge
    rows, columns = image.shape[0] // size, image.shape[1] // size
    x = np.asarray(image, np.float32)
    # (rows / m, m, p, columns / m, m, p, C) -> (rows / m, columns / m, m, m, p, p, C) -> (P, p p C)
    x = x.reshape(rows // merge, merge, size, columns // merge, merge, size, -1).transpose(0, 3, 1, 4, 2, 5, 6)
    return x.reshape(rows * columns, -1), (rows, columns)


class DynamicImageTower(nn.Module):
    """An encoder of images of any size that returns one vector per patch (Qwen2-VL, arXiv 2409.12191, section 2.1).

    Attention is among the patches of an image, and in some layers among those of a window. Parameters:
    `tubelet_embedding/kernel` (frames, p, p, channels, D), for patches through all frames (Arnab et al. 2021, arXiv
    2103.15691, section 3.2), and `encoder/`.
    """

    parameter_axes = declare({"tubelet_embedding/kernel": "_ _ _ _ -> embed"}, role="input")

    config: TransformerConfig  # of the encoder (`TransformerConfig.image_encoder`)
    images: DynamicImageTokens  # the input of the model's config
    execution: Execution = Execution()

    def setup(self):
        self.tubelet_embedding = make_linear(self.config, (self.config.d_model,), 4, use_bias=False)
        self.encoder = Encoder(self.config, execution=self.execution)

    def features(self, images: ImagePatches, deterministic: bool = True) -> tuple[Float[Array, "I P D"], Aux]:
        """Encode the patches of all images of all rows, (I, P, D); also return aux, one number per image."""
        size, channels = self.images.patch_size, self.images.channels
        values, grid = jnp.asarray(images.values), jnp.asarray(images.grid).reshape(-1, 2)
        pixels = values.reshape(-1, values.shape[2], size, size, channels)
        # All frames of a patch show the same image: (I, P, p, p, C) -> (I, P, frames, p, p, C) -> (I, P, D).
        pixels = jnp.broadcast_to(pixels[:, :, None], (*pixels.shape[:2], self.images.frames, *pixels.shape[2:]))
        coordinates, windows = self._places(grid, pixels.shape[1])
        counts = grid[:, 0] * grid[:, 1]
        given = {"positions": coordinates, "mask": Mask.lengths(counts), "segments": windows}
        x, _, aux = self.encoder(self.tubelet_embedding(pixels), **given, deterministic=deterministic)
        return x, aux

    def _places(self, grid: Int[Array, "I 2"], count: int) -> tuple[Int[Array, "I P 2"], Int[Array, "I P"] | None]:
        """Return row and column of each patch, (I, P, 2), and its window, (I, P); None: there are no windows."""
        merge, images = self.images.merge, self.images
        square, inside = jnp.divmod(jnp.arange(count)[None], merge**2)  # the token of a patch, and its index there
        row, column = jnp.divmod(square, jnp.maximum(grid[:, 1:] // merge, 1))  # of the token, (I, P)
        coordinates = jnp.stack([row * merge + inside // merge, column * merge + inside % merge], -1)
        if images.window_size is None:
            return coordinates, None
        side = images.window_size // images.multiple  # tokens per side of a window
        # More windows than a row can have, so that each pair of numbers is another window. 0 would mark padding.
        return coordinates, 1 + row // side * (count + 1) + column // side


class PatchMerger(nn.Module):
    """Map each square of patches to one token by `hidden/`, GELU and `projection/` (Qwen2-VL, section 2.1)."""

    config: TransformerConfig
    images: DynamicImageTokens  # the config's input

    @nn.compact
    def __call__(self, x: Float[Array, "I P Di"]) -> Float[Array, "I S D"]:
        """Map patches (I, P, Di), in the order of `ImagePatches`, to S = P / merge^2 tokens, (I, S, D)."""
        config, merged = self.config, self.images.merge**2
        options = (1, True, kernel_init(config), config.dtype, config.parameters.dtype)
        # (I, P, Di) -> (I, S, merge^2 Di): the patches of a token are neighbors in the order of `ImagePatches`.
        x = x.reshape(x.shape[0], x.shape[1] // merged, merged * x.shape[2])
        x = ACTIVATIONS["gelu_erf"](Linear((x.shape[2],), *options, name="hidden")(x))
        return Linear((config.d_model,), *options, name="projection")(x)


@dataclass(frozen=True)
class TokenPlaces:
    """Which vector of an image replaces each token of a row, and the positions of the tokens."""

    vector: Int[Array, "B T"]  # index of the vector among those of the row, I S of them
    coordinates: Int[Array, "B T 3"]  # time, row and column of each token, without the tokens before this call

    @staticmethod
    def of(is_image: Bool[Array, "B T"], grid: Int[Array, "B I 2"], merge: int, vectors: int) -> TokenPlaces:
        """Return the places of tokens, of which `is_image` are those of images, for the grids of each row in patches.

        The tokens of an image start at the position p after the last token: all have the time p, and the row r and
        column c of the image have the coordinates p + r and p + c. A token of a text has three equal coordinates; the
        one after an image follows the largest coordinate of the image (Qwen2-VL, Wang et al. 2024, section 2.1). Each
        image has `vectors` S of them, padding included; a token is `merge` patches wide.
        """
        rows, columns = grid[..., 0] // merge, grid[..., 1] // merge  # (B, I), in tokens
        counts = rows * columns
        ends = jnp.cumsum(counts, axis=1)
        before = jnp.cumsum(is_image, axis=1) - is_image  # number of image tokens before each token, (B, T)
        # The image of an image token is the number of complete images before it. (B, T, I) -> (B, T)
        number = (ends[:, None, :] <= before[:, :, None]).sum(2)
        image = jnp.minimum(number, grid.shape[1] - 1)
        inside = jnp.where(is_image, before - jnp.take_along_axis(ends - counts, image, axis=1), 0)
        # An image of R x C tokens moves the position by max(R, C) instead of R C.
        saved = jnp.cumsum(jnp.maximum(rows, columns) - counts, axis=1)
        saved = jnp.take_along_axis(jnp.pad(saved, ((0, 0), (1, 0))), number, axis=1)
        start = jnp.arange(is_image.shape[1])[None] + saved - inside
        row, column = jnp.divmod(inside, jnp.maximum(jnp.take_along_axis(columns, image, axis=1), 1))
        return TokenPlaces(image * vectors + inside, jnp.stack([start, start + row, start + column], -1))
