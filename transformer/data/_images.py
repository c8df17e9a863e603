"""Labeled images: shared options, images by split, and the dataset."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from transformer.config._checks import check_whole
from transformer.data._config import check_labels
from transformer.data._dataset import Batch, DataKind, Dataset, fingerprint
from transformer.data._labels import warn_of_missing
from transformer.data.files._images import READING, ImageFiles
from transformer.data.tokenizers._base import Tokenizer


@dataclass(frozen=True)
class Images:
    """Images by split: `splits` contains images (N, height, width, channels) and class indices (N,) into `labels`."""

    splits: Mapping[str, tuple[np.ndarray | ImageFiles, np.ndarray]]
    labels: tuple[str, ...]


def split_by_hash(
    images: np.ndarray, numbers: np.ndarray, validation_share: float, test_share: float
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Split images (N, height, width, channels) and their class indices (N,) by the hash of each image.

    Equal images are therefore in the same split, and adding images does not move other images between splits. Raises
    ValueError if a split has no image.
    """
    # The first 32 bits of the SHA-256, scaled to [0, 1), are uniformly distributed over distinct images.
    places = np.array(
        [int.from_bytes(hashlib.sha256(image.astype("<f4").tobytes()).digest()[:4], "big") for image in images]
    )
    share = places / 2**32
    chosen = {
        "train": share >= validation_share + test_share,
        "validation": (share >= test_share) & (share < validation_share + test_share),
        "test": share < test_share,
    }
    for split, rows in chosen.items():
        if not rows.any():
            raise ValueError(
                f"the {split} split has no image: {len(images)} images are too few for these shares. Use more images "
                "or larger shares."
            )
    return {split: (images[rows], numbers[rows]) for split, rows in chosen.items()}


@dataclass(frozen=True, kw_only=True)
class ImageConfig(DataKind):
    """Options of all kinds of labeled images."""

    task: ClassVar[str] = "image_classifier"

    labels: tuple[str, ...] = ()
    """class names, in the order of the class indices; empty: the indices"""
    max_shift: int = 0
    """data augmentation: shift training images by up to this many pixels in each direction;
    one pass over the data contains every shift of every image once, and new pixels are 0"""
    batch_size: int = 64
    """images per step, over all devices and processes"""
    eval_batch_size: int = 256
    """images per evaluation batch"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size")
        check_whole(self, "max_shift", least=0)
        check_labels(self.labels, "the class indices")

    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes if they are known without reading the images; empty: unknown."""
        return self.labels

    def prepare(self, tokenizer: Tokenizer | None = None) -> ImageDataset:
        return ImageDataset(self, self.read())


class ImageDataset(Dataset):
    """Images and their class indices into `labels`.

    With `max_shift` s, each training image has (2s + 1)^2 rows, one for each shift by whole pixels, so that one pass
    contains each shift exactly once.
    """

    without_pairs = "has numeric data and no texts. Use eval_batches()."

    def __init__(self, config: ImageConfig, images: Images):
        self.config = dataclasses.replace(config, labels=images.labels)
        self.labels = images.labels
        self._images = self._rows = {split: pixels for split, (pixels, _) in images.splits.items()}
        self._targets = {split: numbers for split, (_, numbers) in images.splits.items()}
        warn_of_missing(self._targets, self.labels)
        # The fingerprint hashes int32 arrays: reinterpret the bits of the float32 pixels instead of rounding them.
        files = [pixels for pixels in self._images.values() if isinstance(pixels, ImageFiles)]
        arrays = [] if files else [pixels.view(np.int32) for pixels in self._images.values()]
        arrays += list(self._targets.values())
        shapes = [list(pixels.shape) for pixels in self._images.values()]
        settings = [config.kind, config.max_shift, list(self.labels), shapes, *(part.digest() for part in files)]
        if files:
            self.processor, self.read_options = files[0].processor, READING
        self.fingerprint = fingerprint(settings, {}, arrays)

    def describe(self) -> str:
        height, width, channels = self._images["train"].shape[1:]
        shift = f"; shifted by up to {self.config.max_shift} pixels in training" if self.config.max_shift else ""
        return (
            f"{self.config.kind}: {self._sizes} images of {height} x {width} x {channels}, {len(self.labels)} classes "
            f"({', '.join(self.labels)}){shift}"
        )

    def _size(self, split: str) -> int:
        ways = (2 * self.config.max_shift + 1) ** 2 if split == "train" else 1
        return ways * len(self._images[split])

    def _eval_rows(self, split: str) -> np.ndarray:
        return np.arange(len(self._images[split]))  # without shifts, also for the training split

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        images, shift = self._images[split], self.config.max_shift
        chosen = rows % len(images)  # row = shift index * number of images + image index
        pixels = images[chosen]
        if split == "train" and shift:
            height, width = pixels.shape[1:3]
            padded = np.pad(pixels, ((0, 0), (shift, shift), (shift, shift), (0, 0)))
            # Pad by `shift` on all sides; a shifted image is then the window that starts at (down, right).
            down, right = np.divmod(rows // len(images), 2 * shift + 1)  # each from 0 to 2 * shift; (B,)
            y = down[:, None, None] + np.arange(height)[None, :, None]
            x = right[:, None, None] + np.arange(width)[None, None, :]
            pixels = padded[np.arange(len(rows))[:, None, None], y, x]  # (B, height, width, channels)
        return {"values": pixels, "targets": self._targets[split][chosen], "weights": np.ones(len(rows), np.float32)}
