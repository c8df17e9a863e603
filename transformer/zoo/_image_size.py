"""Change the size of the images that a model reads: interpolate its position table."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.config._parts import Patches
from transformer.config._positions import LearnedOptions, RotaryGridOptions


def with_image_size(
    model: nn.Module, params: PyTree, height: int, width: int, *, antialias: bool = False
) -> tuple[nn.Module, PyTree]:
    """Return the model for images of another size, and its parameters.

    The learned positions of the patches are interpolated (bicubic, as in DINO and PyTorch), those of the learned tokens
    stay as they are. Rotary positions by row and column (DINOv3) fit images of any size, and no parameter
    changes. Models that were not trained with several sizes may become less accurate.

    Args:
        model: a model of images with learned positions or position=RotaryGridOptions(), or a DualEncoder.
        params: its parameters.
        height: height of the images in pixels.
        width: width of the images in pixels.
        antialias: average over wider intervals if the image shrinks, as DINOv2 with registers does.

    Raises:
        ConfigError: a model without images or without learned positions, or a size smaller than a patch.
    """
    config = model.config
    old = config.patches if config.images is None else config.images.patches
    if old is None or (
        config.images is None
        and not old.resize_positions
        and not isinstance(config.position, LearnedOptions | RotaryGridOptions)
    ):
        raise ConfigError(
            f"a {type(model).__name__} with position={config.position} has no table of positions of patches, which "
            f"another image size needs. Pass a model of images with learned positions."
        )
    if old.resize_positions:
        raise ConfigError(
            f"a {type(model).__name__} with resize_positions=True already reads images of any size: pass it "
            f"ImagePatches, or images of {height} x {width} pixels if both are multiples of {old.patch_size}."
        )
    rest = bool(height % old.patch_size or width % old.patch_size)
    new = dataclasses.replace(old, image_height=height, image_width=width, drop_remainder=rest)
    if (new.image_height, new.image_width) == (old.image_height, old.image_width):
        return model, params
    if isinstance(config.position, RotaryGridOptions):
        return model.clone(config=config.replace(input=new)), params
    # A DualEncoder has its encoder of images beside that of texts.
    part = params if config.images is None else params["image"]
    table = _resized(part["encoder"]["position_table"], old, new, antialias)
    part = part | {"encoder": part["encoder"] | {"position_table": table}}
    if config.images is None:
        return model.clone(config=config.replace(input=new, position=LearnedOptions())), part
    return model.clone(config=config.replace(**{"input.encoder.input": new})), params | {"image": part}


def _resized(table: jax.Array, old: Patches, new: Patches, antialias: bool) -> jax.Array:
    """Interpolate a position table (old positions, D) to (new positions, D), in float32."""
    values = np.asarray(table, np.float32)
    extra, width = old.extra_tokens - old.registers, values.shape[1]  # registers have no positions
    grid = values[extra:].reshape(*old.grid, width)
    # (rows, columns, D): first along the rows, then along the columns.
    for axis, size in enumerate(new.grid):
        weights = (antialiased_weights if antialias else bicubic_weights)(grid.shape[axis], size)
        grid = np.moveaxis(np.tensordot(weights, grid, (1, axis)), 0, axis)
    joined = np.concatenate([values[:extra], grid.reshape(-1, width)])
    return jnp.asarray(joined, table.dtype)


def bicubic_weights(old: int, new: int) -> np.ndarray:
    """Return the weights (new, old) of bicubic interpolation of `old` values at the centers of `new` intervals.

    This is the cubic convolution of Keys 1981 with a = -0.75, as in PyTorch without antialiasing; positions outside
    take the value at the border.
    """
    weights = np.zeros((new, old))
    for i in range(new):
        center = (i + 0.5) * old / new - 0.5
        first = int(np.floor(center))
        for tap in range(-1, 3):
            x = abs(center - first - tap)
            near = 1.25 * x**3 - 2.25 * x**2 + 1  # (a + 2) x^3 - (a + 3) x^2 + 1 for x up to 1
            far = -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)  # a x^3 - 5 a x^2 + 8 a x - 4 a for x from 1 to 2
            weights[i, np.clip(first + tap, 0, old - 1)] += near if x <= 1 else far
    return weights.astype(np.float32)


def antialiased_weights(old: int, new: int) -> np.ndarray:
    """Return the weights (new, old) of bicubic interpolation with antialiasing, as in PyTorch and Pillow.

    This is the cubic convolution of Keys 1981 with a = -0.5, stretched by old / new if values are fewer than before.
    Positions outside do not count: the weights of the others are scaled to sum to 1.
    """
    stretch = max(old / new, 1.0)
    centers = (np.arange(new) + 0.5) * old / new
    x = np.abs(np.arange(old) + 0.5 - centers[:, None]) / stretch
    near = 1.5 * x**3 - 2.5 * x**2 + 1  # (a + 2) x^3 - (a + 3) x^2 + 1 for x up to 1
    far = -0.5 * (x**3 - 5 * x**2 + 8 * x - 4)  # a x^3 - 5 a x^2 + 8 a x - 4 a for x from 1 to 2
    weights = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)
