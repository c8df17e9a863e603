"""Images of the user, from a NumPy file."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from transformer.config._checks import nearest
from transformer.data._config import check_path, check_shares
from transformer.data._images import ImageConfig, Images, split_by_hash


@dataclass(frozen=True, kw_only=True)
class ImageFile(ImageConfig):
    """Images of one's own: a NumPy file (.npz) of two arrays, `images` (N, height, width) or (N, height, width,
    channels), bytes 0 to 255 or floating numbers as they are, and `labels` (N,), whole numbers from 0.

    Raises:
        ConfigError: an empty path, or shares that leave nothing to train on.
    """

    kind: ClassVar[str] = "image_file"

    path: str
    """the file"""
    validation_share: float = 0.1
    """share of the images, chosen by their SHA-256, to evaluate on"""
    test_share: float = 0.2
    """share of the images, chosen likewise, to test on"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_shares(self)

    def read(self) -> Images:
        """Return the images; bytes become values from 0 to 1.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it contains something else, or labels that are out of range or all the same.
        """
        images, numbers = _arrays(self.path)
        if numbers.min() < 0 or (self.labels and numbers.max() >= len(self.labels)):
            bad = numbers.min() if numbers.min() < 0 else numbers.max()
            names = f"0 to {len(self.labels) - 1} ({', '.join(self.labels)[:100]})" if self.labels else "0 and above"
            raise ValueError(f"{self.path} has the label {bad}: expected {names}. Mend the file, or --data.labels.")
        labels = self.labels or tuple(map(str, range(int(numbers.max()) + 1)))
        if len(labels) < 2:
            raise ValueError(f"{self.path} has one label, {labels[0]!r}: there is nothing to tell apart.")
        splits = split_by_hash(images, numbers.astype(np.int32), self.validation_share, self.test_share)
        return Images(splits, labels)


def _arrays(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, height, width, channels), float32, and labels (N,) of a file, when they are what they should be."""
    file = Path(path).expanduser()
    if not file.is_file():
        siblings = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        raise FileNotFoundError(f"no file {path}.{nearest(file.name, siblings)} Check the path.")
    try:
        with np.load(file, allow_pickle=False) as found:
            images, numbers = found["images"], found["labels"]
    except (ValueError, TypeError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is no .npz file of two arrays, images and labels ({error}). Write one with "
            "numpy.savez(path, images=..., labels=...)."
        ) from error
    if images.ndim not in (3, 4) or not (images.dtype == np.uint8 or np.issubdtype(images.dtype, np.floating)):
        raise ValueError(
            f"images in {path} must be bytes or floating numbers of shape (N, height, width) or (N, height, width, "
            f"channels), got {images.dtype} of shape {images.shape}."
        )
    if numbers.shape != (len(images),) or not np.issubdtype(numbers.dtype, np.integer) or not len(numbers):
        raise ValueError(
            f"labels in {path} must be whole numbers, one for each of the {len(images)} images, got {numbers.dtype} of "
            f"shape {numbers.shape}."
        )
    images = images if images.ndim == 4 else images[..., None]
    images = images.astype(np.float32) / (255.0 if images.dtype == np.uint8 else 1.0)
    if not np.isfinite(images).all():
        raise ValueError(f"image {int(np.argwhere(~np.isfinite(images))[0, 0])} of {path} is not finite. Mend it.")
    return images.astype(np.float32), numbers
