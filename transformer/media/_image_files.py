"""Read images from files, PIL images and arrays, as arrays of 8-bit or floating-point pixels."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin

from transformer.config._local_paths import is_remote


def open_image(source: Any, channels: int = 3) -> np.ndarray:
    """Read one image.

    The orientation of EXIF is applied. Transparent pixels are blended with white. Of an animation, the first frame is
    used. Grayscale, palette and CMYK images are converted to `channels` channels. 16-bit grayscale is scaled to the
    range of 8 bits without rounding.

    Args:
        source: the path of a file, a PIL image, or an array (height, width) or (height, width, channels): 8-bit
            integers, or floating-point values between 0 and 1.
        channels: channels of the result: 3 (RGB) or 1 (grayscale).

    Returns:
        (height, width, channels), uint8, or float32 with values from 0 to 255.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a URL, a file that is not an image, damaged or too large, or an array of another shape or dtype.
    """
    if isinstance(source, Image.Image):
        return _pixels(source, "the image", channels)
    if isinstance(source, str | os.PathLike):
        return _from_file(os.fspath(source), channels)
    if hasattr(source, "__array__"):
        return _from_array(np.asarray(source), channels)
    raise ValueError(
        f"an image must be a path, a PIL image or an array, got {type(source).__name__}. Pass one of these."
    )


def _from_file(name: str, channels: int) -> np.ndarray:
    if is_remote(name) or name.startswith("data:"):
        raise ValueError(f"{name:.200} is a URL, and URLs are not downloaded. Download the file, and pass its path.")
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(f"image {name} not found. Pass the path of an image file.")
    if not path.is_file():
        raise ValueError(
            f"image {name} must be a regular file, got a directory, pipe or device. Pass the path of a file."
        )
    try:
        with warnings.catch_warnings():
            # The limit of Pillow, which warns above it and raises an error only above twice the limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(path)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"image {name} is too large: {_limit()}") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"image {name} can't be read: Pillow knows no format for it, or its first bytes are damaged. Convert it to "
            f"PNG or JPEG."
        ) from error
    with opened:
        return _pixels(opened, f"image {name}", channels)


def _limit() -> str:
    return (
        f"expected at most {Image.MAX_IMAGE_PIXELS:,} pixels. Resize it before, or raise PIL.Image.MAX_IMAGE_PIXELS "
        f"for a file that you trust."
    )


def _pixels(image: Image.Image, name: str, channels: int) -> np.ndarray:
    """Decode a PIL image and convert it to (height, width, channels)."""
    if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
        raise ValueError(f"{name} is too large: {_limit()}")
    if image.mode in ("I", "F"):
        raise ValueError(
            f"{name} has 32 bits per pixel (mode {image.mode}), so the value of white is unknown. Convert it to 8 "
            f"or 16 bits, or pass an array with values between 0 and 1."
        )
    try:
        _load(image)
        image = ImageOps.exif_transpose(image)
    except Exception as error:  # each format of Pillow raises its own errors for damaged data
        raise ValueError(f"{name} is damaged: {error}. Get the file again, or save it again as PNG or JPEG.") from error
    if image.mode.startswith("I;16"):
        return _with_channels(np.asarray(image).astype(np.float32) * np.float32(255 / 65_535), channels)
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return _with_channels(np.asarray(image.convert("RGB" if channels == 3 else "L")), channels)


def _load(image: Image.Image) -> None:
    """Decode the first frame."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        image.load()
        return
    # Pillow maps an uncompressed file into memory with the size after the rotation that its orientation asks for: the
    # pixels of an image that is rotated by 90 degrees are mixed up. It maps only files whose name it knows.
    name, image.filename = image.filename, ""
    try:
        image.load()
    finally:
        image.filename = name


def _from_array(array: np.ndarray, channels: int) -> np.ndarray:
    shape = array.shape
    if array.ndim not in (2, 3) or 0 in shape or (array.ndim == 3 and shape[2] not in (1, 3, 4)):
        raise ValueError(
            f"an image array must have the shape (height, width) or (height, width, channels) with 1, 3 or 4 channels, "
            f"got {shape}. If channels come first, move them to the end; pass the images of a batch one by one."
        )
    if array.dtype == np.uint8:
        return _pixels(
            Image.fromarray(array[..., 0] if array.ndim == 3 and shape[2] == 1 else array), "the image", channels
        )
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"an image array must have 8-bit integers, or floating-point values between 0 and 1, got {array.dtype}. "
            f"Divide it by its largest possible value."
        )
    low, high = float(array.min()), float(array.max())
    if not (low >= 0.0 and high <= 1.0):  # also true for NaN
        raise ValueError(
            f"a floating-point image must have values between 0 and 1, got {low:.4g} to {high:.4g}. Divide it by its "
            f"largest possible value, or convert it to uint8."
        )
    array = array.astype(np.float32)
    if array.ndim == 3 and shape[2] == 4:  # blend with white
        array = array[..., :3] * array[..., 3:] + (1.0 - array[..., 3:])
    return _with_channels(array * np.float32(255.0), channels)


def _with_channels(array: np.ndarray, channels: int) -> np.ndarray:
    """Return (height, width, channels) for grayscale (height, width) or an image with 1 or 3 channels."""
    array = array[..., None] if array.ndim == 2 else array
    if array.shape[2] == channels:
        return array
    if channels == 3:
        return np.repeat(array, 3, axis=2)
    return (array @ np.array([[0.299], [0.587], [0.114]], np.float32)).astype(np.float32)  # ITU-R 601, as in Pillow
