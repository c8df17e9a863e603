"""Labeled images from a NumPy file of the user."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from transformer.data._config import check_path, check_shares
from transformer.data._images import ImageConfig, Images, split_by_hash
from transformer.data.files._texts import missing


@dataclass(frozen=True, kw_only=True)
class ImageFile(ImageConfig):
    """Your own labeled images: a NumPy file (.npz) with two arrays, `images` and `labels`.

    `images` has the shape (N, height, width) or (N, height, width, channels), with bytes (scaled to 0 to 1) or
    floating-point values (used unchanged). `labels` (N,) are integers from 0.

    Raises:
        ConfigError: an empty path, or shares that leave nothing for training.
    """

    kind: ClassVar[str] = "image_file"

    path: str
    """path of the .npz file"""
    validation_share: float = 0.1
    """fraction of the images to hold out for evaluation during training, selected by the SHA-256 of an image"""
    test_share: float = 0.2
    """fraction of the images to hold out for the test, selected by the SHA-256 of an image"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_shares(self)

    def read(self) -> Images:
        """Return the images; bytes are divided by 255.

        Raises ValueError for unexpected content, and for labels that are out of range or all equal.
        """
        images, numbers = _arrays(self.path)
        if numbers.min() < 0 or (self.labels and numbers.max() >= len(self.labels)):
            bad = numbers.min() if numbers.min() < 0 else numbers.max()
            names = f"0 to {len(self.labels) - 1} ({', '.join(self.labels)[:100]})" if self.labels else "0 and above"
            raise ValueError(f"{self.path} has the label {bad}: expected {names}. Fix the file, or --data.labels.")
        labels = self.labels or tuple(map(str, range(int(numbers.max()) + 1)))
        if len(labels) < 2:
            raise ValueError(f"{self.path} has only the label {labels[0]!r}: expected at least two.")
        splits = split_by_hash(images, numbers.astype(np.int32), self.validation_share, self.test_share)
        return Images(splits, labels)


def _arrays(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Read and check images (N, height, width, channels), as float32, and labels (N,)."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise missing(file, path)
    try:
        with np.load(file, allow_pickle=False) as found:
            images, numbers = found["images"], found["labels"]
    except (ValueError, TypeError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not an .npz file with the arrays images and labels ({error}). Create one with "
            "numpy.savez(path, images=..., labels=...)."
        ) from error
    if images.ndim not in (3, 4) or not (images.dtype == np.uint8 or np.issubdtype(images.dtype, np.floating)):
        raise ValueError(
            f"images in {path} must be bytes or floating-point values of shape (N, height, width) or (N, height, "
            f"width, channels), got {images.dtype} of shape {images.shape}."
        )
    if numbers.shape != (len(images),) or not np.issubdtype(numbers.dtype, np.integer) or not len(numbers):
        raise ValueError(
            f"labels in {path} must be integers, one for each of the {len(images)} images, got {numbers.dtype} of "
            f"shape {numbers.shape}."
        )
    images = images if images.ndim == 4 else images[..., None]
    images = images.astype(np.float32) / (255.0 if images.dtype == np.uint8 else 1.0)
    if not np.isfinite(images).all():
        raise ValueError(f"image {int(np.argwhere(~np.isfinite(images))[0, 0])} of {path} is not finite. Fix the file.")
    return images.astype(np.float32), numbers
