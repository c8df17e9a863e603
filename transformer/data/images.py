"""Labeled images as a dataset."""

from __future__ import annotations

import dataclasses

import numpy as np

from transformer.data.configs import ImageConfig
from transformer.data.dataset import Batch, Dataset, fingerprint
from transformer.data.sources import Images


class ImageDataset(Dataset):
    """Images and the number of their class among `labels`. With `max_shift` s each training image counts as (2s + 1)^2
    rows, one for each way to move it by whole pixels, which the order of rows shuffles: nothing is drawn.

    `config` is the one that was given, with labels filled in.
    """

    task = "image_classifier"

    def __init__(self, config: ImageConfig, images: Images):
        self.config = dataclasses.replace(config, labels=images.labels)
        self.labels = images.labels
        self._images = {split: pixels for split, (pixels, _) in images.splits.items()}
        self._targets = {split: numbers for split, (_, numbers) in images.splits.items()}
        arrays = [pixels.view(np.int32) for pixels in self._images.values()] + list(self._targets.values())
        shapes = [list(pixels.shape) for pixels in self._images.values()]
        settings = [config.kind, config.max_shift, list(self.labels), shapes]
        self.fingerprint = fingerprint(settings, {}, arrays)

    @property
    def splits(self) -> tuple[str, ...]:
        """`train`, `validation` and `test`."""
        return tuple(self._images)

    def describe(self) -> str:
        """One line: images, sizes, classes."""
        sizes = ", ".join(f"{len(pixels):,} {split}" for split, pixels in self._images.items())
        height, width, channels = self._images["train"].shape[1:]
        shift = f"; moved by up to {self.config.max_shift} pixels in training" if self.config.max_shift else ""
        return (
            f"{self.config.kind}: {sizes} images of {height} x {width} x {channels}, {len(self.labels)} classes "
            f"({', '.join(self.labels)}){shift}"
        )

    def _size(self, split: str) -> int:
        ways = (2 * self.config.max_shift + 1) ** 2 if split == "train" else 1
        return ways * len(self._images[split])

    def _eval_rows(self, split: str) -> np.ndarray:
        return np.arange(len(self._images[split]))

    def _assemble(self, split: str, rows: np.ndarray) -> Batch:
        images, shift = self._images[split], self.config.max_shift
        chosen = rows % len(images)
        pixels = images[chosen]
        if split == "train" and shift:
            height, width = pixels.shape[1:3]
            padded = np.pad(pixels, ((0, 0), (shift, shift), (shift, shift), (0, 0)))
            down, right = np.divmod(rows // len(images), 2 * shift + 1)
            y = down[:, None, None] + np.arange(height)[None, :, None]
            x = right[:, None, None] + np.arange(width)[None, None, :]
            pixels = padded[np.arange(len(rows))[:, None, None], y, x]
        return {"values": pixels, "targets": self._targets[split][chosen], "weights": np.ones(len(rows), np.float32)}
