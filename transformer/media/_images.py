"""Preprocessing of images: resize, crop, rescale, normalize."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from transformer.config._checks import ConfigError, check_choices, check_flags, check_positive, check_whole

Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
Numbers = tuple[float, ...]

MAX_ASPECT_RATIO = 200
"""Largest ratio of the sides of an image that is resized to multiples of a number, as in the reference."""


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Preprocessing of images for a vision model: resize, crop the center, rescale, normalize.

    Resizing computes the filters of Pillow with antialiasing: in 8 bits for 8-bit images (unless `in_floats`), in
    floating point for other images. `image_processor` of this package reads the settings from the directory of a model.

    Raises:
        ConfigError: a size below 1, an unknown filter, or means and deviations that are not one number per channel.
    """

    height: int | None = None
    """height after resizing; only together with `width`, then the aspect ratio changes"""
    width: int | None = None
    """width after resizing"""
    shortest_edge: int | None = None
    """length of the shorter side after resizing, instead of `height` and `width`: the aspect ratio is kept"""
    multiple: int | None = None
    """resize to a height and a width that are multiples of this number, nearest to those of the image, instead of
    `height` and `width`; only together with `min_pixels` and `max_pixels` (Qwen2-VL, Wang et al. 2024, arXiv
    2409.12191, section 2.1), or with `max_patches`"""
    min_pixels: int | None = None
    """with `multiple`: smallest height x width; smaller images are enlarged"""
    max_pixels: int | None = None
    """with `multiple`: largest height x width; larger images are shrunk"""
    max_patches: int | None = None
    """with `multiple`, instead of `min_pixels` and `max_pixels`: scale each image so that it has as many patches of
    multiple x multiple pixels as possible, at most this number (NaFlex in SigLIP 2, Tschannen et al. 2025, arXiv
    2502.14786, section 2.4)"""
    resample: Resample = "bilinear"
    """filter for resizing"""
    in_floats: bool = False
    """resize 8-bit images in floating point, without rounding to levels (DINOv3)"""
    crop_height: int | None = None
    """height of the center that is kept; smaller images are padded with black; None: keep everything"""
    crop_width: int | None = None
    """width of the center that is kept"""
    rescale_factor: float = 1 / 255
    """factor on the values from 0 to 255"""
    mean: Numbers = (0.5, 0.5, 0.5)
    """subtracted from each channel after rescaling; its length is the number of channels, 3 (RGB) or 1"""
    std: Numbers = (0.5, 0.5, 0.5)
    """each channel is divided by it afterwards"""

    def __post_init__(self):
        check_choices(self, resample=Resample)
        check_whole(self, "height", "width", "shortest_edge", "crop_height", "crop_width")
        check_whole(self, "multiple", "min_pixels", "max_pixels", "max_patches")
        check_positive(self, "rescale_factor")
        check_flags(self, "in_floats")
        for one, other in (("height", "width"), ("crop_height", "crop_width")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ConfigError(f"{one} and {other} of an ImageProcessor must be set together. Set both, or none.")
        if self.height is not None and self.shortest_edge is not None:
            raise ConfigError("an ImageProcessor resizes to height and width, or to shortest_edge. Remove one of them.")
        self._check_multiple()
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean) or not all(s > 0 for s in self.std):
            raise ConfigError(
                f"mean and std of an ImageProcessor need one number per channel (1 or 3), and std must be positive, "
                f"got {self.mean!r:.80} and {self.std!r:.80}. Change them."
            )

    def _check_multiple(self):
        names = ("multiple", "max_patches") if self.max_patches else ("multiple", "min_pixels", "max_pixels")
        given = [getattr(self, name) is not None for name in names]
        if len(set(given)) != 1:
            raise ConfigError(
                f"{', '.join(names[:-1])} and {names[-1]} of an ImageProcessor must be set together. Set all, or none."
            )
        if self.multiple is None:
            return
        others = ("height", "shortest_edge", "crop_height", *(("min_pixels", "max_pixels") if self.max_patches else ()))
        if found := next((name for name in others if getattr(self, name) is not None), None):
            raise ConfigError(f"an ImageProcessor with multiple has no {found}. Remove one of them.")
        if self.max_patches is None and not self.multiple**2 <= self.min_pixels <= self.max_pixels:
            raise ConfigError(
                f"min_pixels ({self.min_pixels}) must be at least multiple x multiple ({self.multiple**2}) and at most "
                f"max_pixels ({self.max_pixels}). Change them."
            )

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of all results; None: they depend on the image."""
        if self.crop_height is not None:
            return self.crop_height, self.crop_width
        return None if self.height is None else (self.height, self.width)

    def __call__(self, images: Sequence[Any]) -> np.ndarray:
        """Preprocess images, each a path, a PIL image or an array (see `open_image`).

        Returns:
            (B, height, width, channels), float32.

        Raises:
            FileNotFoundError, ValueError: errors of `open_image`, no images, or images whose results differ in size.
        """
        if isinstance(images, str) or not isinstance(images, Sequence):
            raise ValueError(f"images must be a list, got {type(images).__name__}. For a single image, pass [image].")
        results = [self._one(image) for image in images]
        shapes = {result.shape for result in results}
        if len(shapes) != 1:
            sizes = ", ".join(f"{height} x {width}" for height, width, _ in sorted(shapes)) or "no images"
            raise ValueError(
                f"the images of a batch must have one size after preprocessing, got {sizes}. Pass them alone."
            )
        return np.stack(results)

    def flat_patches(self, images: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Preprocess images of any aspect ratio and cut each into patches of multiple x multiple pixels.

        Returns:
            (B, max_patches, multiple x multiple x channels), float32, the patches of each image row by row, then zeros;
            and (B, 2), int32, rows and columns of patches. They are the arguments of `nn.ImagePatches`.

        Raises:
            ConfigError: `max_patches` is not set.
            FileNotFoundError, ValueError: errors of `open_image`.
        """
        if self.max_patches is None:
            raise ConfigError("flat_patches needs an ImageProcessor with multiple and max_patches. Set both.")
        size, channels = self.multiple, len(self.mean)
        values = np.zeros((len(images), self.max_patches, size * size * channels), np.float32)
        grid = np.zeros((len(images), 2), np.int32)
        for number, image in enumerate(images):
            x = self._one(image)
            rows, columns = grid[number] = x.shape[0] // size, x.shape[1] // size
            # (rows, p, columns, p, C) -> (rows, columns, p, p, C)
            cut = x.reshape(rows, size, columns, size, channels).swapaxes(1, 2)
            values[number, : rows * columns] = cut.reshape(rows * columns, -1)
        return values, grid

    def size_of(self, image: Any) -> tuple[int, int]:
        """Return height and width of one image after preprocessing, without computing it.

        Raises:
            FileNotFoundError, ValueError: as a call.
        """
        height, width = self._opened(image).shape[:2]
        return self.size or self._resized(height, width) or (height, width)

    def _opened(self, image: Any) -> np.ndarray:
        from transformer.media._image_files import open_image  # needs Pillow, which the settings alone do not

        x = open_image(image, len(self.mean))
        if self.min_pixels is not None and max(x.shape[:2]) > MAX_ASPECT_RATIO * min(x.shape[:2]):
            raise ValueError(
                f"{_name(image)} has {x.shape[1]} x {x.shape[0]} pixels: expected sides with a ratio of at most "
                f"{MAX_ASPECT_RATIO}. Crop it before."
            )
        return x

    def _one(self, image: Any) -> np.ndarray:
        x, name = self._opened(image), _name(image)
        if (size := self._resized(*x.shape[:2])) is not None:
            x = _resize(x.astype(np.float32) if self.in_floats else x, size, self.resample, name)
        if self.crop_height is not None:
            x = _center_crop(x, self.crop_height, self.crop_width)
        x = x.astype(np.float32) * np.float32(self.rescale_factor)
        return (x - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)

    def _resized(self, height: int, width: int) -> tuple[int, int] | None:
        """Return the size of an image after resizing, before cropping; None: no resizing."""
        if self.max_patches is not None:
            return most_patches(height, width, self.multiple, self.max_patches)
        if self.multiple is not None:
            return nearest_multiples(height, width, self.multiple, self.min_pixels, self.max_pixels)
        if self.shortest_edge is None:
            return None if self.height is None else (self.height, self.width)
        longer = int(self.shortest_edge * max(height, width) / min(height, width))
        return (longer, self.shortest_edge) if width <= height else (self.shortest_edge, longer)


def _name(image: object) -> str:
    return str(image) if isinstance(image, str) or hasattr(image, "__fspath__") else "the image"


def nearest_multiples(height: int, width: int, multiple: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width after resizing to multiples of `multiple`, with height x width in the given range.

    The aspect ratio is kept as far as possible: each side is rounded, and if the product is out of range, both sides
    are scaled by the same factor first, and rounded towards the range. No side becomes 0, so that a very narrow image
    can have more pixels.
    """
    rows, columns = (round(side / multiple) * multiple for side in (height, width))
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return tuple(max(multiple, math.floor(side / shrink / multiple) * multiple) for side in (height, width))
    if rows * columns < min_pixels:
        stretch = math.sqrt(min_pixels / (height * width))
        return tuple(math.ceil(side * stretch / multiple) * multiple for side in (height, width))
    return rows, columns


def most_patches(height: int, width: int, multiple: int, max_patches: int) -> tuple[int, int]:
    """Return the height and width of an image that is scaled to as many patches as possible, at most `max_patches`.

    Both sides are multiplied by the same factor and rounded up to multiples of `multiple`. The largest factor below 100
    is searched by bisection to 1e-5, with the limits of the reference: the result depends on them.
    """

    def scaled(factor: float) -> tuple[int, int]:
        return tuple(max(multiple, math.ceil(side * factor / multiple) * multiple) for side in (height, width))

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        rows, columns = (side // multiple for side in scaled(middle))
        low, high = (middle, high) if rows * columns <= max_patches else (low, middle)
    return scaled(low)


def _resize(x: np.ndarray, size: tuple[int, int], resample: Resample, name: str) -> np.ndarray:
    """Resize (height, width, C) to (*size, C)."""
    from PIL import Image

    height, width = size
    if Image.MAX_IMAGE_PIXELS is not None and height * width > Image.MAX_IMAGE_PIXELS:
        raise ValueError(
            f"{name} has {x.shape[1]} x {x.shape[0]} pixels and would be resized to {width} x {height}, more than "
            f"{Image.MAX_IMAGE_PIXELS:,}, because its aspect ratio is kept. Crop it before."
        )
    kernel = Image.Resampling[resample.upper()]
    if x.dtype == np.uint8 and x.shape[2] == 3:
        return np.asarray(Image.fromarray(x).resize((width, height), kernel))
    # One channel at a time, as 8-bit (mode L) or floating-point (mode F) images.
    planes = [Image.fromarray(np.ascontiguousarray(x[..., c])) for c in range(x.shape[2])]
    return np.stack([np.asarray(plane.resize((width, height), kernel)) for plane in planes], axis=2)


def _center_crop(x: np.ndarray, height: int, width: int) -> np.ndarray:
    """Keep the center of (H, W, C); where the image is smaller, pad it with zeros. Odd rows are added at the start."""
    for axis, size in enumerate((height, width)):
        missing = size - x.shape[axis]
        if missing > 0:
            pads = [(0, 0)] * 3
            pads[axis] = (missing - missing // 2, missing // 2)
            x = np.pad(x, pads)
        else:
            start = -missing // 2
            x = np.take(x, np.arange(start, start + size), axis)
    return x
