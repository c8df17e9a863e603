"""The handwritten digits of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from transformer.config._checks import ConfigError
from transformer.data._images import ImageConfig, Images, split_by_hash


@dataclass(frozen=True, kw_only=True)
class Digits(ImageConfig):
    """The handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels with values from 0 to 1 (Alpaydin and Kaynak
    1998, UCI Optical Recognition of Handwritten Digits). 10 % are for validation and 20 % for the test, selected by the
    SHA-256 of an image.

    Raises:
        ConfigError: the number of labels is not ten.
    """

    kind: ClassVar[str] = "digits"

    labels: tuple[str, ...] = tuple("0123456789")
    """names of the ten classes"""

    def __post_init__(self):
        super().__post_init__()
        if len(self.labels) != 10:
            raise ConfigError(f"labels must have ten names, for the digits 0 to 9, got {len(self.labels)}.")

    def read(self) -> Images:
        """Return the images with values from 0 to 1. Raises ModuleNotFoundError if scikit-learn is not installed."""
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "the digits are part of scikit-learn, which is not installed. Run pip install scikit-learn.",
                name="sklearn",
            ) from error
        found = load_digits()
        # The images have values from 0 to 16.
        images = (found.images / 16.0).astype(np.float32)[..., None]
        return Images(split_by_hash(images, found.target.astype(np.int32), 0.1, 0.2), self.labels)
